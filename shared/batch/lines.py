"""Reads the lines of a batch file in OpenAI's format: ``custom_id``, ``method``, ``url``,
``body``."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct

MAX_ID_CHARS = 512
READ_BYTES = 1 << 20
ENDPOINTS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/responses",
        "/v1/messages",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/pooling",
        "/classify",
    }
)
"""The endpoints a line may name. A server may lack some of them."""

Text = tuple[int, bytes | None]
"""The number of a line, from 1, and its bytes; None if it is too long."""


@dataclass(frozen=True, slots=True)
class LineError:
    """The error in line ``number``."""

    number: int
    code: str
    message: str
    param: str | None = None
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request. ``body`` is a JSON object."""

    number: int
    custom_id: str
    url: str
    body: Raw


class _Line(Struct):
    custom_id: str
    method: str
    url: str
    body: Raw


class _Streams(Struct):
    stream: Any = None


class _Id(Struct):
    custom_id: Any = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_streams = msgspec.json.Decoder(_Streams).decode
_decode_id = msgspec.json.Decoder(_Id).decode


def read_lines(
    path: Path, max_bytes: int, on_bytes: Callable[[bytes], object] = len
) -> Iterator[Text]:
    """All lines except blank ones; holds at most one line of ``max_bytes``. ``on_bytes`` gets all
    bytes read. Raises OSError."""
    with path.open("rb", buffering=READ_BYTES) as file:
        for number in count(1):
            text = file.readline(max_bytes + 1)
            on_bytes(text)
            if not text:
                return
            if len(text) <= max_bytes or text.endswith(b"\n"):
                if text.strip():
                    yield number, text
                continue
            while text and not text.endswith(b"\n"):
                text = file.readline(READ_BYTES)
                on_bytes(text)
            yield number, None


def parse_line(text: Text, max_bytes: int, endpoint: str | None = None) -> BatchLine | LineError:
    """``endpoint``, if given, is the only one allowed."""
    number, data = text
    if data is None:
        message = f"line {number} has more than {max_bytes} bytes"
        return LineError(number, "line_too_long", message)
    try:
        line = _decode(data)
    except msgspec.ValidationError as error:
        return LineError(number, "invalid_line", f"line {number}: {error}", None, _id_of(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return LineError(number, "invalid_json_line", f"line {number} is not JSON: {error}")
    wrong = _wrong(line, endpoint)
    if wrong is not None:
        code, param, reason = wrong
        shown_id = line.custom_id[:MAX_ID_CHARS]
        return LineError(number, code, f"line {number}: {param} {reason}", param, shown_id)
    return BatchLine(number, line.custom_id, line.url, line.body)


def _wrong(line: _Line, endpoint: str | None) -> tuple[str, str, str] | None:
    """Code, field and reason."""
    if not 0 < len(line.custom_id) <= MAX_ID_CHARS:
        num = len(line.custom_id)
        return "invalid_custom_id", "custom_id", f"has {num} characters; 1 to {MAX_ID_CHARS}"
    if line.method.upper() != "POST":
        return "invalid_method", "method", f"is {line.method[:60]!r}; expected 'POST'"
    if endpoint is not None and line.url != endpoint:
        return "mismatched_url", "url", f"is {line.url[:60]!r}; that of the batch is {endpoint!r}"
    if line.url not in ENDPOINTS:
        allowed = ", ".join(sorted(ENDPOINTS))
        return "invalid_url", "url", f"is {line.url[:60]!r}; expected one of {allowed}"
    try:
        streams = _decode_streams(line.body).stream
    except msgspec.ValidationError:
        return "invalid_line", "body", "is not an object"
    if streams not in (None, False):
        return "unsupported_parameter", "body.stream", "is set; a batch has no streams"
    return None


def _id_of(data: bytes) -> str | None:
    """The id of a line that is otherwise invalid, perhaps not even JSON after its first wrong
    field."""
    try:
        given = _decode_id(data).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return given[:MAX_ID_CHARS] if isinstance(given, str) else None
