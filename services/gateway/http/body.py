"""The body of a request, within its limits of size and time."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import hdrs, web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web_protocol import RequestPayloadError

from services.gateway.http.admission import Reservation
from services.gateway.http.fair_time import on_thread
from services.gateway.http.head_parser import CODINGS, UnsupportedCoding, let_continue, reason_of
from services.gateway.http.violations import show
from shared.errors import BodyTooLarge, InvalidRequest

READ_TIMEOUT_S = 60.0
MAX_INLINE_BYTES = 64 << 10
JSON = "application/json"
Body = bytes | bytearray
READ_BODY: web.RequestKey[Body] = web.RequestKey("read_body")
"""Holds a body that was read to find the endpoint, until the endpoint reads it."""

Parsed = TypeVar("Parsed")


class BodyReader:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def read(self, request: web.Request, reservation: Reservation | None = None) -> Body:
        """``reservation`` holds the bytes that have arrived. Raises BodyTooLarge, before reading if
        the client gave the length; InvalidRequest for a body that ends early or is badly
        compressed; Overloaded; web.HTTPRequestTimeout; web.HTTPUnsupportedMediaType for a content
        type other than JSON."""
        known: Body | None = request.pop(READ_BODY, None)
        if known is not None:
            if reservation is not None:
                reservation.hold(len(known))
            return known
        _check_content_type(request)
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large(str(request.content_length))
        check_coding(request)
        await let_continue(request)
        body = bytearray()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for chunk in request.content.iter_any():
                    if len(body) + len(chunk) > self._max_bytes:
                        raise self._too_large("more")
                    if reservation is not None:
                        reservation.hold(len(chunk))
                    body += chunk
            return body
        except RequestPayloadError as error:
            raise _unreadable(error) from None
        except TimeoutError:
            text = f"the body did not come within {READ_TIMEOUT_S:g} s"
            raise web.HTTPRequestTimeout(reason=text) from None

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(f"the body has {size} bytes; the limit is {self._max_bytes}")


class BodyParser:
    """Parses large bodies one after the other on a thread: the intermediate objects are larger than
    the result, and exist only once at a time."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "parse")

    async def parse(
        self, body: Body, parse: Callable[[Body], Parsed], num_more_bytes: int = 0
    ) -> Parsed:
        """``parse`` reads ``num_more_bytes`` besides ``body``."""
        if len(body) + num_more_bytes <= MAX_INLINE_BYTES:
            return parse(body)
        return await on_thread(self._thread, parse, body)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _check_content_type(request: web.Request) -> None:
    """A page in a browser may send any other type, or none, to any server without a preflight."""
    given = request.headers.get(hdrs.CONTENT_TYPE, "")
    content_type = given.partition(";")[0].strip().lower()
    if content_type != JSON and (content_type or hdrs.ORIGIN in request.headers):
        raise web.HTTPUnsupportedMediaType(
            reason=f"Content-Type is {show(content_type)}; expected {JSON}",
            headers={hdrs.ACCEPT: JSON},
        )


def check_coding(request: web.Request) -> None:
    """Raises UnsupportedCoding."""
    coding = request.headers.get(hdrs.CONTENT_ENCODING, "").lower()
    if coding not in ("", "identity", *CODINGS):
        raise UnsupportedCoding


def _unreadable(error: RequestPayloadError) -> Exception:
    match error.__cause__:
        case MemoryError() as cause:
            return cause
        case BadHttpMessage() as cause:
            return InvalidRequest(f"the body cannot be read: {reason_of(cause)}")
    return InvalidRequest("the body cannot be read")
