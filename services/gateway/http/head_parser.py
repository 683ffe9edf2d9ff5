"""aiohttp's parser of requests within a limit for heads, and its faults as client errors."""

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.compression_utils import HAS_BROTLI, HAS_ZSTD
from aiohttp.http_exceptions import (
    BadHttpMessage,
    BadHttpMethod,
    BadStatusLine,
    ContentEncodingError,
    InvalidURLError,
    LineTooLong,
)
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestPayloadError
from multidict import CIMultiDict, CIMultiDictProxy

from services.gateway.http.violations import show
from shared.errors import InternalError, RequestError

MAX_URL_BYTES = 8 << 10
MAX_HEAD_BYTES = 64 << 10
"""The limit of all headers, and so of each of them: tokens of single sign-on have 20 KB."""
MAX_HEADERS = 64
CODINGS = ["gzip", "deflate", *["br"] * HAS_BROTLI, *["zstd"] * HAS_ZSTD]
"""The supported codings of bodies."""

VERSION_WORDS = "the version of HTTP is not 1.0 or 1.1"

Fed = tuple[Sequence[Any], bool, bytes]
NOTHING: Fed = ((), False, b"")

_KNOWN = re.compile(r"(Missing|Duplicate) '[\w-]+' header|Can not decode content-encoding: \w+")
_METHOD = re.compile(r"\n\n  b['\"][!#$%&*+.^_`|~0-9A-Za-z-]+ ")


class UnsupportedCoding(RequestError):
    """A body has an unsupported compression."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"

    def __init__(self) -> None:
        super().__init__(f"the Content-Encoding is none of {', '.join(CODINGS)}")


class HeadTooLong(BadHttpMessage):
    """An unfinished head is too long already."""


class HeadParser:
    """Counts the bytes of a head for ``parser`` while they come: each of many headers may be as
    long as all of them together. Raises BadHttpMessage and MemoryError alone, for any other error
    would leave a callback of the loop. A fault of a body is for its reader, and makes the parser
    ``is_broken``: it parses no more."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._payload: Any = None  # of the last request
        self._num_head_bytes = 0
        self.is_broken = False
        self.feed_eof = parser.feed_eof
        self.message_consumed = parser.message_consumed
        self.pause_reading = parser.pause_reading
        self.set_upgraded = parser.set_upgraded

    def feed_data(self, data: bytes) -> Fed:
        if self.is_broken:
            return NOTHING
        try:
            fed = self._fed(data)
        except Exception as error:
            known = isinstance(error, BadHttpMessage | MemoryError)
            fault = error if known else BadHttpMessage(type(error).__name__)
            if not self._is_in_body:
                raise fault from None
            self._payload.set_exception(RequestPayloadError(), fault)
            fed = NOTHING
        if self._payload is not None and self._payload.exception() is not None:
            self.is_broken = True
            self._payload.feed_eof()  # else aiohttp reads on after the answer
        return fed

    def _fed(self, data: bytes) -> Fed:
        is_head = not self._is_in_body
        fed: Fed = self._parser.feed_data(data)
        if messages := fed[0]:
            self._payload, self._num_head_bytes = messages[-1][1], 0
        elif is_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_URL_BYTES + MAX_HEAD_BYTES:
                raise HeadTooLong("")
        return fed

    @property
    def _is_in_body(self) -> bool:
        return self._payload is not None and not self._payload.is_eof()


def fault_of(error: BaseException | None) -> RequestError:
    """The client's error for a request that failed before it reached a route. The text is our own:
    aiohttp's quotes the request and the keys in it."""
    match error:
        case LineTooLong(args=(_, limit, *_)) if limit == MAX_URL_BYTES:
            text = f"the URL has more than {limit} bytes"
            return _fault(HTTPStatus.REQUEST_URI_TOO_LONG, text, "uri_too_long")
        case LineTooLong() | HeadTooLong():
            return _too_large(f"the headers have more than {MAX_HEAD_BYTES} bytes")
        case BadHttpMessage(message="Too many headers received"):
            return _too_large(f"there are more than {MAX_HEADERS} headers")
        case ContentEncodingError(message=message) if "Please install" in message:
            return UnsupportedCoding()
        case BadHttpMethod(message=message) if _METHOD.search(message):
            return _fault(HTTPStatus.NOT_IMPLEMENTED, "the method is not known here")
        case BadStatusLine(message=message) if "  Invalid HTTP version" in message:
            return _fault(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, VERSION_WORDS)
        case BadHttpMessage(message=message) if message.startswith("Pause on PRI"):
            return _fault(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, VERSION_WORDS)
        case BadHttpMessage():
            return _fault(HTTPStatus.BAD_REQUEST, f"not HTTP: {reason_of(error)}")
    return InternalError("the request broke inside the server")


def reason_of(error: BadHttpMessage) -> str:
    """The part of the error's text without quotations."""
    text = error.message.removeprefix("Bad status line:\n  ")
    if error.message.startswith("Received HTTPS"):
        return "HTTPS came to a port of HTTP"
    if isinstance(error, InvalidURLError):
        return "the URL is malformed"
    if match := _KNOWN.match(text):
        return match[0]
    reason, quotes, _ = text.partition(":\n\n")
    return reason if quotes else "it is malformed"


def _too_large(message: str) -> RequestError:
    return _fault(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)


def _fault(status: HTTPStatus, message: str, code: str | None = None) -> RequestError:
    """``code``, where Python's versions have several names for the status."""
    fault = RequestError(message, code=code or status.name.lower())
    fault.status, fault.type = status, "invalid_request_error"
    return fault


# ``Expect``: a client that waits for our permission to send its body (RFC 9110, 10.1.1).
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
EXPECTED = web.RequestKey("expected", str)
"""The request's ``Expect`` value, if any."""


def take_expectation(message: Any) -> tuple[Any, str]:
    """``message`` without ``Expect``, and its value: otherwise aiohttp would answer before the
    request is checked."""
    if message.version < HttpVersion11 or hdrs.EXPECT not in message.headers:
        return message, ""
    headers = CIMultiDict(message.headers)
    expected = ", ".join(headers.popall(hdrs.EXPECT))
    return message._replace(headers=CIMultiDictProxy(headers)), expected


@web.middleware
async def check_expectation(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raises web.HTTPExpectationFailed."""
    expected = request.get(EXPECTED, "")
    if expected and expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(
            reason=f"Expect is {show(expected)}; only 100-continue is known"
        )
    return await handler(request)


async def let_continue(request: web.Request) -> None:
    """Asks for the body."""
    if request.get(EXPECTED):
        await request.writer.write(CONTINUE)
        request.writer.output_size = 0  # aiohttp would take it for a response that has begun
