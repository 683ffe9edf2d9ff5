"""Token ids to text, piece by piece, never half a character; and the bytes of each id of a
tokenizer. Pure."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from shared.text.utf8 import MAX_CHAR_BYTES, num_half_bytes

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


MAX_WINDOW_TOKENS = 64
PIECE_TOKENS = 16  # of many ids that come at once, so that the window stays short
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

DecodeIds = Callable[[Sequence[int]], str]


class Seam(NamedTuple):
    """The last ids of the prompt that a text goes on from: ``whole`` ones, and ``half`` ones, which
    end in half a character. The text begins with that character."""

    whole: Sequence[int] = ()
    half: Sequence[int] = ()


NO_SEAM = Seam()  # of a text of its own
NUM_SEAM_IDS = 16


def seam_of(ids: Sequence[int], written: Sequence[bytes]) -> Seam:
    """The seam after ``ids``, from the bytes of each token."""
    num_half = num_half_bytes(b"".join(written[token_id] for token_id in ids[-MAX_CHAR_BYTES:]))
    end = len(ids)
    while num_half > 0:
        end -= 1
        num_half -= len(written[ids[end]])
    return Seam(ids[:end], ids[end:])


class Detokenizer:
    """Text of one growing list of ids, which may continue other ids at a ``seam``.

    The text of a token depends on its neighbours (a space, the rest of a character), so each piece
    is the difference between decoding a short window with and without the new ids. Replacement
    characters at the end are held back: a byte-level decoder writes one for an incomplete
    character, a decoder with byte fallback writes one for each byte of the character's run.
    A long window that ends in replacement characters moves past ids with certain text, so that it
    stays short; without such ids, only the last can become text, and the others go out.
    """

    def __init__(self, decode: DecodeIds, seam: Seam = NO_SEAM) -> None:
        self._decode = decode
        self._context = list(seam.whole)  # ids with sent text that the next ids depend on
        self._window = list(seam.half)
        text = self._text_of(self._window)
        self._num_out = len(text.rstrip(REPLACEMENT))  # characters of the window's text

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now certain; empty while a character is incomplete."""
        starts = range(0, len(ids), PIECE_TOKENS)
        return "".join(self._push(ids[start : start + PIECE_TOKENS]) for start in starts)

    def _push(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        text = self._text_of(self._window)
        if not text.endswith(REPLACEMENT):
            return self._move_on(text)
        new = self._give_out(text.rstrip(REPLACEMENT))
        return new if len(self._window) < MAX_WINDOW_TOKENS else new + self._shorten(text)

    def flush(self) -> str:
        """The rest, with a replacement character if the last character is incomplete."""
        return self._move_on(self._text_of(self._window))

    def _text_of(self, ids: Sequence[int]) -> str:
        """The text that ``ids``, the window or its beginning, add to the context's text."""
        if not ids:
            return ""
        before, text = self._decode(self._context), self._decode([*self._context, *ids])
        if not before.endswith(REPLACEMENT) and not text.startswith(before):
            return self._decode(ids)  # byte fallback: they break a run that was partly sent
        return text[len(before) :]

    def _give_out(self, certain: str) -> str:
        new = certain[self._num_out :]
        self._num_out = max(self._num_out, len(certain))
        return new

    def _shorten(self, text: str) -> str:
        """Shortens the long window of ``text``; returns the text that goes out."""
        new = ""
        if not (num_ids := self._num_certain()):
            new = self._give_out(text[:-1])
            num_ids = self._num_certain()
        return new + (self._move_past(num_ids) if num_ids else self._move_on(text))

    def _num_certain(self) -> int:
        """The number of ids that can become the context.

        They end with a character, or leave one incomplete that was already sent: the window
        continues after it.
        """
        for end in range(len(self._window) - 1, 0, -1):
            num_characters = len(self._text_of(self._window[:end]))
            is_whole = not self._decode(self._window[:end]).endswith(REPLACEMENT)
            if num_characters and (is_whole or num_characters <= self._num_out):
                return end
        return 0

    def _move_past(self, num_ids: int) -> str:
        text = self._text_of(self._window[:num_ids])
        new = self._give_out(text)
        self._context, self._window = self._window[:num_ids], self._window[num_ids:]
        self._num_out -= len(text)
        return new

    def _move_on(self, text: str) -> str:
        new = text[self._num_out :]
        if text:
            self._context, self._window, self._num_out = self._window, [], 0
        elif len(self._window) >= MAX_WINDOW_TOKENS:
            self._window = []  # special tokens only: nothing depends on them
        return new
