"""``tokenizer.json`` of tokens that are bytes in the order of their ranks, the best first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.formats.gguf.tokenizer import BYTE_LEVEL, bpe, merges_of

MAX_TOKEN_BYTES = 1024  # the search for merges is quadratic in a token's bytes. Chosen
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def ranked_vocab(file: Path, tokens: Sequence[bytes], place: str) -> dict[str, int]:
    """Ranks by tokens, whose bytes are written as byte-level BPE writes them. The ``place`` of a
    token in ``file`` is for errors: ConfigError."""
    letters, vocab = _letters(), dict[str, int]()
    for rank, token in enumerate(tokens):
        if not 1 <= len(token) <= MAX_TOKEN_BYTES:
            raise ConfigError(
                f"model: {file}: {place} {rank + 1} has {len(token)} bytes; it may have 1 to"
                f" {MAX_TOKEN_BYTES}"
            )
        vocab.setdefault("".join(letters[byte] for byte in token), rank)
        if len(vocab) <= rank:
            raise ConfigError(f"model: {file}: {place} {rank + 1} has the token of an earlier one")
    if missing := set(letters) - set(vocab):
        raise ConfigError(f"model: {file}: {len(missing)} of 256 bytes are no tokens")
    return vocab


def tokenizer_of_ranks(
    vocab: Mapping[str, int],
    pattern: str,
    added: Sequence[Mapping[str, Any]],
    num_before: int = 0,
    bos: str | None = None,
) -> dict[str, Any]:
    """The content of tokenizer.json. Ids are the ranks in ``vocab`` after ``num_before`` added
    tokens; a text begins with ``bos``, one of them."""
    ranks = [-float(rank) for rank in range(len(vocab))]
    before = {each["content"]: each["id"] for each in added if each["id"] < num_before}
    ids = {text: num_before + rank for text, rank in vocab.items()} | before
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**FLAGS, **each} for each in added],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}],
        },
        "post_processor": None if bos is None else _begins(bos, before[bos]),
        "decoder": BYTE_LEVEL | {"use_regex": True},
        "model": bpe(ids, merges_of(vocab, ranks, set()), ignore_merges=True),
    }


def _begins(bos: str, id: int) -> dict[str, Any]:
    first, second = (
        [
            {"SpecialToken": {"id": bos, "type_id": kind}},
            {"Sequence": {"id": name, "type_id": kind}},
        ]
        for kind, name in enumerate("AB")
    )
    return {
        "type": "TemplateProcessing",
        "single": first,
        "pair": [*first, *second],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    }


def _letters() -> list[str]:
    """For each byte the character that stands for it: itself if it can be seen."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
