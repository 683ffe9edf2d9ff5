"""The body of a request, within its limits of size and time."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestPayloadError

from shared.errors import BodyTooLarge, InvalidRequest

READ_TIMEOUT_S = 60.0
MAX_INLINE_BYTES = 1 << 20

Parsed = TypeVar("Parsed")


class BodyReader:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    async def read(self, request: web.Request) -> bytes:
        """Raises BodyTooLarge, before reading where the client told the length; InvalidRequest
        for a body that ends early or is badly compressed; web.HTTPRequestTimeout."""
        self._check_length(request)
        if hdrs.EXPECT in request.headers:
            await _let_continue(request)
        body = bytearray()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                async for chunk in request.content.iter_any():
                    body += chunk
                    if len(body) > self._max_bytes:
                        raise self._too_large("more")
            return bytes(body)
        except RequestPayloadError as error:
            raise InvalidRequest(f"the body cannot be read: {error}") from None
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    def bound(self, request: web.Request) -> int:
        """The bytes that reading the body may take. Raises BodyTooLarge."""
        self._check_length(request)
        if request.content_length is None or hdrs.CONTENT_ENCODING in request.headers:
            return self._max_bytes
        return request.content_length

    async def expect(self, request: web.Request) -> None:
        """What asks with ``Expect: 100-continue`` is told by ``read``: here, where aiohttp would
        answer, nothing has been checked yet."""

    def _check_length(self, request: web.Request) -> None:
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large(str(request.content_length))

    def _too_large(self, size: str) -> BodyTooLarge:
        return BodyTooLarge(f"the body has {size} bytes; the limit is {self._max_bytes}")


async def _let_continue(request: web.Request) -> None:
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # aiohttp would take it for a response that has begun


async def parsed(body: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
    """``parse(body)``, on a thread where it takes long."""
    if len(body) <= MAX_INLINE_BYTES:
        return parse(body)
    return await asyncio.to_thread(parse, body)
