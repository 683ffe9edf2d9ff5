"""Replaces lone UTF-16 surrogates, which JSON can contain and text cannot. Pure."""

import re

MAX_HALVES = 1 << 16
CALL_BYTES = 256 << 10
REPLACEMENT = b"\\ufffd"

_HALF = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# The most pieces per match, and bytes of each, since other threads wait meanwhile.
_WHOLE = re.compile(
    rb"(?:[^\\]{1,1024}+"
    rb"|\\[^u]"
    rb"|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}){0,1024}+"
)


def without_halves(text: str) -> str:
    """``text`` with U+FFFD in place of each lone surrogate."""
    return text if text.isascii() else _HALF.sub("\N{REPLACEMENT CHARACTER}", text)


def without_escaped_halves(data: bytes | bytearray) -> bytes | bytearray:
    """JSON ``data`` with U+FFFD in place of lone surrogates, at most ``MAX_HALVES``; ``data``
    itself without any."""
    if not _has_escapes(data):
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
            break  # not JSON
    return data if mended is None else mended


def _has_escapes(data: bytes | bytearray) -> bool:
    """Whether ``data`` may have an escaped surrogate; found in pieces, since each call holds the
    GIL."""
    for place in range(0, len(data), CALL_BYTES):
        end = place + CALL_BYTES + 2  # of an escape across two pieces
        if data.find(b"\\", place, end) < 0:
            continue
        if data.find(b"\\ud", place, end) >= 0 or data.find(b"\\uD", place, end) >= 0:
            return True
    return False
