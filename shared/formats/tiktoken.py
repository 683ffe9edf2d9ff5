"""Makes ``tokenizer.json`` of ``tiktoken.model``, the tokens of Kimi's models: the bytes of each in
base64, and its rank, the best first."""

import base64
import binascii
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.formats.ranked import ranked_vocab, tokenizer_of_ranks
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
    vocab = ranked_vocab(file, _tokens(file), "line")
    named = {
        int(id): each
        for id, each in config.added_tokens_decoder.items()
        if id.isdecimal() and len(id) < 10
    }
    added = [
        {"id": id, "content": each.content, "special": each.special}
        for id in range(len(vocab), len(vocab) + NUM_SPECIAL)
        for each in [named.get(id, _Token(f"<|reserved_token_{id}|>"))]
    ]
    return tokenizer_of_ranks(vocab, PATTERN, added)


def _tokens(file: Path) -> list[bytes]:
    found = []
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
        found.append(token)
    return found
