"""Counts and cuts long JSON texts before they are decoded.

A piece inside of a string is passed over. Any other costs about the same whatever it contains, and
numpy releases the GIL meanwhile. Cuts are at valid places; the slices themselves are validated by
their reader.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from shared.wire.codec import Array

PIECE_BYTES = 64 << 10

_QUOTE, _BACKSLASH, _COMMA, _COLON, _OPEN, _CLOSE = b'"\\,:{}'
NO_PLACES = np.zeros(0, np.intp)
_TO_BRACE = 0x20  # turns a bracket into a brace


class TooManyValues(Exception):
    """A text has more than ``limit`` names and values."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} names and values")
        self.limit = limit


def num_values(text: memoryview, limit: int) -> int:
    """The number of names and values in ``text``, possibly slightly too high. Raises
    TooManyValues."""
    scan = _Scan(limit)
    for _, piece in _pieces(text):
        scan.read(piece)
    return scan.num_values


def slices(whole: memoryview, max_values: int | None = None) -> Iterator[memoryview]:
    """An array or object without its brackets, in slices of whole items with the commas between
    them; an item above ``PIECE_BYTES`` is a slice of its own. From ``PIECE_BYTES`` on,
    raises DecodeError for unbalanced brackets, and TooManyValues."""
    if whole.nbytes <= PIECE_BYTES:
        yield whole[1:-1]
        return
    scan, start = _Scan(max_values), 1
    for place, piece in _pieces(whole):
        outermost = scan.read(piece)
        for comma in dict.fromkeys([*outermost[:1].tolist(), *outermost[-1:].tolist()]):
            yield _filled(whole[start : place + comma])
            start = place + comma + 1
    if not scan.is_closed or bytes(whole[:: whole.nbytes - 1]) not in (b"[]", b"{}"):
        raise msgspec.DecodeError("JSON is malformed: brackets do not match")
    yield _filled(whole[start:-1])


def _filled(some: memoryview) -> memoryview:
    if some.nbytes <= PIECE_BYTES and not bytes(some).strip():
        raise msgspec.DecodeError("JSON is malformed: a comma without a value")
    return some


def _pieces(text: memoryview) -> Iterator[tuple[int, bytes]]:
    """Each piece with its start."""
    for place in range(0, text.nbytes, PIECE_BYTES):
        yield place, bytes(text[place : place + PIECE_BYTES])


class _Scan:
    """Reads a text piece by piece. ``is_closed`` is True when all brackets and strings are
    closed."""

    def __init__(self, max_values: int | None) -> None:
        self.num_values = 0
        self._max_values = max_values
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False  # True if the next byte is escaped

    @property
    def is_closed(self) -> bool:
        return not self._depth and not self._is_in_string

    def read(self, text: bytes) -> Array:
        """[n] int: places of the commas between items of the outermost array or object. Raises
        TooManyValues."""
        if self._is_in_string and b'"' not in text:
            self._pass_over(text)
            return NO_PLACES
        piece = np.frombuffer(text, np.uint8)
        is_outside = ~self._in_strings(piece)
        braces = piece | _TO_BRACE
        is_open, is_close = (braces == _OPEN) & is_outside, (braces == _CLOSE) & is_outside
        is_comma, is_colon = (piece == _COMMA) & is_outside, (piece == _COLON) & is_outside
        self.num_values += sum(int(np.count_nonzero(x)) for x in (is_open, is_comma, is_colon))
        if self._max_values is not None and self.num_values > self._max_values:
            raise TooManyValues(self._max_values)
        return self._outermost(is_open, is_close, is_comma)

    def _pass_over(self, text: bytes) -> None:
        """``text`` has no quote."""
        num = len(text) - len(text.rstrip(b"\\"))
        if num == len(text) and self._is_escaped:
            num -= 1
        self._is_escaped = num % 2 == 1

    def _outermost(self, is_open: Array, is_close: Array, is_comma: Array) -> Array:
        """[n] int: places of the commas at depth one."""
        places = np.flatnonzero(is_open | is_close | is_comma)
        changes = is_open[places].astype(np.int32) - is_close[places]
        depths = self._depth + np.cumsum(changes)
        if len(depths):
            self._depth = int(depths[-1])
        found: Array = places[(depths == 1) & is_comma[places]]
        return found

    def _in_strings(self, piece: Array) -> Array:
        """[n] bool: bytes in a string, its opening quote included, its closing quote excluded."""
        is_quote = piece == _QUOTE
        is_quote[self._escaped(piece)] = False
        num_quotes = np.cumsum(is_quote, dtype=np.uint8)  # only parity matters, so uint8 may wrap
        in_strings = (num_quotes & 1).astype(np.bool_) ^ self._is_in_string
        self._is_in_string = bool(in_strings[-1])
        return in_strings

    def _escaped(self, piece: Array) -> Array:
        """[n] int: places of the bytes that a run of backslashes escapes."""
        is_backslash = piece == _BACKSLASH
        first = [0] if self._is_escaped else []
        if self._is_escaped:
            is_backslash[0] = False
        places = np.flatnonzero(is_backslash)
        ends = np.flatnonzero(np.diff(places, append=-1) != 1)
        lengths = np.diff(ends, prepend=-1)
        behind = places[ends[lengths % 2 == 1]] + 1
        self._is_escaped = bool(len(behind)) and int(behind[-1]) == len(piece)
        return np.concatenate([first, behind[behind < len(piece)]]).astype(np.intp)
