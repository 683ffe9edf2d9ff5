"""How single tokens are written: the bytes of each id of a tokenizer."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of the ids 0 … ``vocab_size`` − 1; ids that the tokenizer lacks have none.

    Byte-level vocabularies (GPT-2's) write each byte as one printable character; SentencePiece's
    write a space as ▁ and a byte that is no character as <0x0A>.
    """
    is_byte_level = "ByteLevel" in _kinds(json.loads(tokenizer.to_str())["decoder"])
    to_bytes = _byte_level if is_byte_level else _sentence_piece
    added = {token: each.content for token, each in tokenizer.get_added_tokens_decoder().items()}
    written = [b""] * vocab_size
    for piece, token in tokenizer.get_vocab().items():
        if token < vocab_size:
            written[token] = added[token].encode() if token in added else to_bytes(piece)
    return written


def partial_ids(written: Iterable[bytes]) -> Iterator[int]:
    """The ids of tokens that are no whole characters."""
    for token_id, data in enumerate(written):
        try:
            data.decode()
        except UnicodeDecodeError:
            yield token_id


def _kinds(decoder: dict[str, Any] | None) -> set[str]:
    if decoder is None:
        return set()
    return {decoder["type"], *(each["type"] for each in decoder.get("decoders", ()))}


def _byte_level(piece: str) -> bytes:
    codes = [_BYTES.get(character) for character in piece]
    known = [code for code in codes if code is not None]
    return bytes(known) if len(known) == len(codes) else piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(piece):
        return bytes.fromhex(match[1])
    return piece.replace(SPACE, " ").encode()


def _byte_characters() -> dict[str, int]:
    """Printable bytes of Latin-1 are themselves; the others follow from code point 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()
