"""The client of one request, who must read what we write."""

import asyncio
import logging
from collections.abc import Awaitable, Mapping

from aiohttp import web
from prometheus_client import Counter

from services.gateway.request_id import request_id

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 10

SLOW_CLIENTS = Counter(
    "shoal_slow_clients", "Clients that read nothing for slow-client-s; their requests ended"
)


class Client:
    """Writes a response. Raises ConnectionError where the client has left, or has read nothing for
    ``slow_s``: then its connection is cut off."""

    def __init__(self, request: web.Request, slow_s: float) -> None:
        self._request = request
        self._slow_s = slow_s
        self.response = web.StreamResponse()

    async def begin(self, headers: Mapping[str, str]) -> None:
        """Sends the status 200. From here on the request can only end as it began."""
        self.response.headers.update(headers)
        self._request[CLIENT] = self
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """In pieces: whoever reads slowly but steadily reads one in time."""
        view = memoryview(data)
        for start in range(0, len(data), PIECE_BYTES):
            await self._in_time(self.response.write(view[start : start + PIECE_BYTES]))

    async def end(self) -> web.StreamResponse:
        await self._in_time(self.response.write_eof())
        return self.response

    async def _in_time(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._slow_s):
                await writing
        except TimeoutError:
            self._cut_off()

    def _cut_off(self) -> None:
        SLOW_CLIENTS.inc()
        log.warning(
            "%s is cut off: it read nothing of request %s for slow-client-s = %g s",
            *(self._request.remote, request_id(self._request), self._slow_s),
        )
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ConnectionResetError("the client does not read")


CLIENT = web.RequestKey("client", Client)
"""The client of a request whose status is sent already."""
