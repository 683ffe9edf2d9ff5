"""Halves of UTF-16's surrogate pairs, which JSON can write and no text holds. Pure."""

import re

MAX_HALVES = 1 << 16
REPLACEMENT = b"\\ufffd"

_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# At most so many pieces at once, since other threads wait meanwhile.
_WHOLE = re.compile(
    rb"(?:[^\\]++"
    rb"|\\[^u]"
    rb"|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}){0,65536}+"
)


def without_halves(text: str) -> str:
    """``text`` with U+FFFD in place of each half."""
    return text if text.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


def without_escaped_halves(data: bytes | bytearray) -> bytes | bytearray:
    """JSON ``data`` with U+FFFD in place of each half, of ``MAX_HALVES`` at most; ``data`` itself
    where there is none."""
    if b"\\ud" not in data and b"\\uD" not in data:
        return data
    mended: bytearray | None = None
    place = num_halves = 0
    while place < len(data) and num_halves < MAX_HALVES:
        found = _WHOLE.match(data, place)
        assert found is not None
        if found.end() > place:
            place = found.end()
        elif half := _ESCAPED_HALF.match(data, place):
            mended = bytearray(data) if mended is None else mended
            mended[place : half.end()] = REPLACEMENT
            place, num_halves = half.end(), num_halves + 1
        else:
            break  # no JSON
    return data if mended is None else mended
