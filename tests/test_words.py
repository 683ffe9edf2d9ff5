"""Identifiers are in the terms of docs/glossary.md: no second word for what has one there."""

import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TERMS = {
    "coin": "random bits",
    "coins": "random bits",
    "exchange": "output collector",
    "glance": "mesh metrics",
    "nobody": "null block, null slot",
    "seat": "allocation",
    "suspect": "isolated",
    "tell": "send, log",
    "tells": "sends, logs",
    "told": "logprobs, scored",
    "trip": "open prompt",
    "wishes": "logits rules",
}
SOURCES = sorted(
    path
    for folder in ("cli", "kernels", "services", "shared")
    for path in ROOT.glob(f"{folder}/**/*.py")
)


def words_of(identifier: str) -> list[str]:
    split = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", identifier.replace("RoundTrip", ""))
    return [word.lower() for word in split]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_identifiers_are_in_the_terms_of_the_glossary(path: Path):
    with tokenize.open(path) as file:
        names = {
            (token.string, token.start[0])
            for token in tokenize.generate_tokens(file.readline)
            if token.type == tokenize.NAME
        }
    found = {
        f"line {line}: {name}; the glossary says {TERMS[word]}"
        for name, line in names
        for word in words_of(name.replace("round_trip", "").replace("ROUND_TRIP", ""))
        if word in TERMS
    }
    assert not found


def test_an_identifier_is_split_into_its_words():
    assert words_of("num_told") == ["num", "told"]
    assert words_of("OpenTrip") == ["open", "trip"]
    assert words_of("MAX_COINS") == ["max", "coins"]
