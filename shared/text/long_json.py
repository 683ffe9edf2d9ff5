"""Decodes long JSON texts, in calls that hold the GIL for a few milliseconds each."""

import codecs
import re
from typing import Any

import msgspec
from msgspec import Raw

from shared.text.json_scan import PIECE_BYTES, slices

MAX_VALUES = 1 << 18
"""Names and values of a chat: one thread decodes them in about 50 ms."""
MAX_NAME_BYTES = 4096
CALL_BYTES = 256 << 10
MAX_LEVELS = 8  # of brackets; each needs another scan for cuts

_BLANKS = b" \t\r\n"
_NAME = re.compile(rb'("(?:[^"\\]|\\.){0,%d}+")[ \t\r\n]*:' % MAX_NAME_BYTES, re.DOTALL)
_ESCAPE_BYTES = 6  # of a character; a surrogate pair has two
_HIGH, _LOW = re.compile(rb"\\u[dD][89abAB]"), re.compile(rb"\\u[dD][c-fC-F]")


def decode(text: memoryview, num_levels: int = MAX_LEVELS) -> Any:
    """The decoded value. Raises MsgspecError, UnicodeDecodeError or RecursionError."""
    if text.nbytes <= CALL_BYTES or not num_levels:
        return msgspec.json.decode(text)
    match bytes(text[:1]):
        case b'"':
            return decode_text(text)
        case b"[":
            return _array(text, num_levels)
        case b"{":
            return _object(text, num_levels)
        case _:
            return msgspec.json.decode(text)


def _array(text: memoryview, num_levels: int) -> list[Any]:
    values: list[Any] = []
    for some in slices(text):
        if some.nbytes > PIECE_BYTES:
            values.append(decode(stripped(some), num_levels - 1))
        else:
            values += msgspec.json.decode(b"".join((b"[", some, b"]")))
    return values


def _object(text: memoryview, num_levels: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for some in slices(text):
        if some.nbytes > PIECE_BYTES:
            name, value = named(some)
            fields[name] = decode(value, num_levels - 1)
        else:
            fields |= msgspec.json.decode(b"".join((b"{", some, b"}")))
    return fields


def named(field: memoryview) -> tuple[str, memoryview]:
    """The name and the value of one field of an object. Raises DecodeError."""
    field = stripped(field)
    found = _NAME.match(field)
    if found is None:
        raise msgspec.DecodeError(
            f"JSON is malformed: no name of at most {MAX_NAME_BYTES} bytes before a value"
        )
    return msgspec.json.decode(found[1], type=str), stripped(field[found.end() :])


def stripped(text: memoryview) -> memoryview:
    """Without leading and trailing whitespace."""
    while text and not bytes(text[:PIECE_BYTES]).strip(_BLANKS):
        text = text[PIECE_BYTES:]
    while text and not bytes(text[-PIECE_BYTES:]).strip(_BLANKS):
        text = text[:-PIECE_BYTES]
    first, last = bytes(text[:PIECE_BYTES]), bytes(text[-PIECE_BYTES:])
    num_before = len(first) - len(first.lstrip(_BLANKS))
    num_behind = len(last) - len(last.rstrip(_BLANKS))
    return text[num_before : text.nbytes - num_behind]


def decode_text(string: memoryview) -> str:
    """The text of a JSON string. Raises MsgspecError or UnicodeDecodeError."""
    if string.nbytes <= CALL_BYTES:
        return msgspec.json.decode(string, type=str)
    if bytes(string[-1:]) != b'"':
        raise msgspec.DecodeError("JSON is malformed: a string that does not end")
    texts, start, end = [], 1, string.nbytes - 1
    while start < end:
        cut = _cut(string, start, start + CALL_BYTES) if start + CALL_BYTES < end else end
        texts.append(msgspec.json.decode(b"".join((b'"', string[start:cut], b'"')), type=str))
        start = cut
    return "".join(texts)


def encode_text(text: str) -> Raw:
    """The text as a JSON string."""
    pieces = [text[start : start + CALL_BYTES] for start in range(0, len(text), CALL_BYTES)]
    return Raw(b'"%b"' % b"".join(msgspec.json.encode(piece)[1:-1] for piece in pieces))


def check_utf8(text: memoryview) -> None:
    """Raises UnicodeDecodeError."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, text.nbytes, CALL_BYTES):
        decoder.decode(text[start : start + CALL_BYTES])
    decoder.decode(b"", final=True)


def _cut(string: memoryview, start: int, place: int) -> int:
    """The last place up to ``place`` on a character boundary; ``start`` is one."""
    begin = place - 2 * _ESCAPE_BYTES
    escape = begin + bytes(string[begin:place]).rfind(b"\\")
    before = bytes(string[start:escape])
    num_backslashes = len(before) - len(before.rstrip(b"\\"))
    if escape >= begin and num_backslashes % 2 == 0:
        is_second = _LOW.match(string, escape) and _HIGH.match(string, escape - _ESCAPE_BYTES)
        return escape - _ESCAPE_BYTES if is_second else escape
    while string[place] & 0xC0 == 0x80:  # not the first byte of a character
        place -= 1
    return place
