"""``data:`` URLs (RFC 2397) with base64."""

import binascii
import re
from collections.abc import Iterator

import numpy as np
from msgspec import Raw

from services.gateway.http.violations import show
from shared.errors import InvalidRequest
from shared.media import frame_list
from shared.media.family import WITH_ARTICLE
from shared.text.long_json import CALL_BYTES, decode_text
from shared.wire.codec import Array
from shared.wire.messages import MediumKind

EXPECTED = {
    "image": "a data: URL such as data:image/png;base64,…",
    "video": "a data: URL such as data:video/mp4;base64,… or, with a frame behind each comma,"
    " data:video/jpeg;base64,…,…",
}
FRAMES = b"video/jpeg"  # vLLM's
MAX_HEAD_BYTES = 256

_HEAD = re.compile(rb"data:([^,;]*)((?:;[^,;]*)*),", re.IGNORECASE)


def read_data_url(url: Raw, param: str, kind: MediumKind, expected: str) -> Array:
    """The bytes of a file, [n] uint8, from the JSON of the URL in the field ``param``. Raises
    InvalidRequest, with the ``expected`` URLs."""
    text = _unescaped(memoryview(url))
    start = bytes(text[:MAX_HEAD_BYTES])
    head = _HEAD.match(start)
    if start[:5].lower() != b"data:":
        raise _refusal(url, param, f"expected {expected}")
    if head is None or head[2].lower().rpartition(b";")[2] != b"base64":
        raise _refusal(url, param, f"it has no base64; expected {EXPECTED[kind]}")
    if not head[1].lower().startswith(f"{kind}/".encode()):
        reason = f"its media type is none of {WITH_ARTICLE[kind]}; expected {EXPECTED[kind]}"
        raise _refusal(url, param, reason)
    data = text[head.end() :]
    if head[1].lower() == FRAMES:
        _check_count(data, param)
        return frame_list.pack([_decoded(each, param) for each in _split(data)])
    return _decoded(data, param)


def _check_count(text: memoryview, param: str) -> None:
    places = range(0, text.nbytes, CALL_BYTES)
    num = 1 + sum(bytes(text[place : place + CALL_BYTES]).count(b",") for place in places)
    if num > (most := frame_list.MAX_FRAMES):
        raise InvalidRequest(f"{param} has {num} frames; the limit is {most}", param=param)


def _split(text: memoryview) -> Iterator[memoryview]:
    """At commas."""
    start = 0
    for place in range(0, text.nbytes, CALL_BYTES):
        for found in re.finditer(b",", bytes(text[place : place + CALL_BYTES])):
            yield text[start : place + found.start()]
            start = place + found.end()
    yield text[start:]


def _unescaped(url: memoryview) -> memoryview:
    """The text between the quotes, in the same memory unless something in it is escaped."""
    text = url[1:-1]
    places = range(0, text.nbytes, CALL_BYTES)
    if any(b"\\" in bytes(text[place : place + CALL_BYTES]) for place in places):
        return memoryview(decode_text(url).encode())
    return text


def _decoded(text: memoryview, param: str) -> Array:
    """In pieces, since each call holds the GIL."""
    if not text:
        raise InvalidRequest(f"{param} has no data", param=param)
    file = np.empty(text.nbytes // 4 * 3, np.uint8)
    done = 0
    try:
        for place in range(0, text.nbytes, CALL_BYTES):
            piece = binascii.a2b_base64(text[place : place + CALL_BYTES], strict_mode=True)
            if done != place // 4 * 3:
                raise binascii.Error("Excess data after padding")
            file[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
            done += len(piece)
    except binascii.Error as error:
        reason = str(error)[:1].lower() + str(error)[1:]
        raise InvalidRequest(f"{param} is not base64: {reason}", param=param) from None
    return file[:done]


def _refusal(url: Raw, param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} is {show(url)}; {reason}", param=param)
