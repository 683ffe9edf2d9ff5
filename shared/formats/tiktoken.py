"""Makes ``tokenizer.json`` of ``tiktoken.model``, the tokens of Kimi's models: the bytes of each in
base64, and its rank, the best first."""

import base64
import binascii
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.formats.gguf.tokenizer import BYTE_LEVEL, bpe, merges_of
from shared.model_folder import decode_json, find_file

TOKENIZER_CLASS = "TikTokenTokenizer"
NUM_SPECIAL = 258  # ids after the ranks; unnamed ones are reserved
# After moonshotai/Kimi-Linear-48B-A3B-Instruct, tokenization_kimi.py.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


class _Token(msgspec.Struct):
    content: str
    special: bool = True


class _Config(msgspec.Struct):
    tokenizer_class: str = ""
    added_tokens_decoder: dict[str, _Token] = {}


def tokenizer_of(file: Path) -> dict[str, Any]:
    """The content of tokenizer.json. Raises ConfigError."""
    config = decode_json(find_file(file.parent, "tokenizer_config.json"), _Config)
    if config.tokenizer_class != TOKENIZER_CLASS:
        raise ConfigError(
            f"model: {file}: tokenizer_class {config.tokenizer_class!r} is not known; for"
            f" tiktoken's files it is {TOKENIZER_CLASS}, of Kimi"
        )
    vocab = _vocab(file)
    named = {
        int(id): each
        for id, each in config.added_tokens_decoder.items()
        if id.isdecimal() and len(id) < 10
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": id, "content": each.content, "special": each.special, **flags}
        for id in range(len(vocab), len(vocab) + NUM_SPECIAL)
        for each in [named.get(id, _Token(f"<|reserved_token_{id}|>"))]
    ]
    split = {
        "type": "Split",
        "pattern": {"Regex": PATTERN},
        "behavior": "Isolated",
        "invert": False,
    }
    ranks = [-float(rank) for rank in range(len(vocab))]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, BYTE_LEVEL | {"use_regex": False}],
        },
        "post_processor": None,
        "decoder": BYTE_LEVEL | {"use_regex": True},
        "model": bpe(vocab, merges_of(vocab, ranks, set()), ignore_merges=True),
    }


def _vocab(file: Path) -> dict[str, int]:
    """Ids by tokens, whose bytes are written as byte-level BPE writes them."""
    letters, vocab = _letters(), dict[str, int]()
    for number, line in enumerate(file.read_bytes().splitlines()):
        text, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(text, validate=True)
        except binascii.Error:
            token = b""
        if not token or rank != str(number).encode():
            raise ConfigError(
                f"model: {file}: line {number + 1} is {line[:40]!r}; expected are base64 and the"
                f" rank {number}"
            )
        vocab.setdefault("".join(letters[byte] for byte in token), number)
        if len(vocab) <= number:
            raise ConfigError(f"model: {file}: line {number + 1} has the token of an earlier line")
    if missing := set(letters) - set(vocab):
        raise ConfigError(f"model: {file}: {len(missing)} of 256 bytes are no tokens")
    return vocab


def _letters() -> list[str]:
    """For each byte the character that stands for it: itself if it can be seen."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
