"""Random texts that a grammar admits, with the marks of their added tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from services.gateway.text.machine import TokenMark
from tests.services.tokenizer.guides.conftest import END_IDS, Vocabulary, compiled

MAX_IDS = 300
MAX_TRIES = 40
SNIPPETS = ("a", " ", "\n", '"', "'", "\\", "<", ">", "{", "}", "[", "]", ",", ":", "=", "&", "é👩")
VALUES = ("3", "-0.5", "true", "null", "None", '"x"', '{"k": 1}', "Celsius", "</", "]]>", "\n\n")


@dataclass(frozen=True)
class Admitted:
    """``marks`` are those of added tokens in ``text``."""

    text: str
    marks: list[TokenMark]


def admitted(
    vocabulary: Vocabulary, grammar: str, markers: Sequence[str], rng: random.Random
) -> Admitted:
    """A whole text; its parts are random tokens, markers and values, as far as they are allowed."""
    for _ in range(MAX_TRIES):
        ids = _walk(vocabulary, grammar, markers, rng)
        if ids is not None:
            return _marked(vocabulary, ids)
    raise AssertionError(f"no text ends within {MAX_IDS} tokens")


def _walk(
    vocabulary: Vocabulary, grammar: str, markers: Sequence[str], rng: random.Random
) -> list[int] | None:
    matcher = compiled(vocabulary.matching, grammar).deep_copy()
    ids: list[int] = []
    while len(ids) < MAX_IDS:
        allowed = _allowed(matcher)
        if not allowed or (matcher.is_accepting() and rng.random() < 0.5):
            return ids
        part = [rng.choice(allowed)]
        if len(allowed) > 1 and rng.random() < 0.8:
            part = vocabulary.encode(rng.choice((*markers, *markers, *SNIPPETS, *VALUES)))
        num = matcher.try_consume_tokens(part)
        ids += part[:num]
    return None


def _allowed(matcher: LLMatcher) -> list[int]:
    """The ids that may come next, without those that end a text."""
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    ids: list[int] = allowed[~np.isin(allowed, END_IDS)].tolist()
    return ids


def _marked(vocabulary: Vocabulary, ids: list[int]) -> Admitted:
    texts = {token: text for text, token in vocabulary.added.items()}
    text, marks, plain = "", [], []
    for index, token in enumerate(ids):
        if token not in texts:
            plain.append(token)
            continue
        text += vocabulary.tokenizer.decode(plain, skip_special_tokens=False)
        marks.append(TokenMark(len(text), len(texts[token]), index, texts[token]))
        text, plain = text + texts[token], []
    return Admitted(text + vocabulary.tokenizer.decode(plain, skip_special_tokens=False), marks)
