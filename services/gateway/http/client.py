"""The client of one request, and the check that it reads our output."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress

from aiohttp import hdrs, web

from services.gateway.http.json_reply import error_event
from services.gateway.mesh.observer import Attributes
from shared.errors import RequestError

WRITE_CHUNK_BYTES = 64 << 10
EVENT_STREAM = "text/event-stream"


class Client:
    """Writes a response; a HEAD request gets only the head. Raises ConnectionError if the client
    has left."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._written_s = 0.0  # when the last of it was
        self.num_writes = 0
        self.write_s = 0.0
        self._is_asked = asyncio.Event()
        self.is_between_events = False
        self.response = web.StreamResponse()
        self.failure: Callable[[RequestError], bytes] = error_event

    async def begin(
        self, headers: Mapping[str, str], failure: Callable[[RequestError], bytes] = error_event
    ) -> None:
        """Sends the status 200. After it the status is fixed; a stream ends with ``failure`` of its
        error."""
        self._written_s = time.monotonic()
        self.failure = failure
        self.response.headers.update(headers)
        self._request[CLIENT] = self
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Writes ``WRITE_CHUNK_BYTES`` at a time, and waits while much is unread."""
        if not self.takes_body:
            return
        self._written_s = time.monotonic()
        view = memoryview(data)
        for start in range(0, len(data), WRITE_CHUNK_BYTES):
            await self.response.write(view[start : start + WRITE_CHUNK_BYTES])
        self.num_writes += 1
        self.write_s += time.monotonic() - self._written_s

    async def end(self) -> web.StreamResponse:
        await self.response.write_eof()
        return self.response

    def cut_off(self) -> None:
        """Closes the connection: it shows the client that the reply is incomplete."""
        if self._request.transport is not None:
            self._request.transport.abort()

    @property
    def takes_body(self) -> bool:
        return self._request.method != hdrs.METH_HEAD

    @property
    def is_stream(self) -> bool:
        return self.response.content_type == EVENT_STREAM

    @contextmanager
    def counted(self, attributes: Attributes) -> Iterator[None]:
        """Puts the time of writing, which depends on the client's reading, into ``attributes``."""
        try:
            yield
        finally:
            attributes["num_writes"] = self.num_writes
            attributes["write_ms"] = round(1000 * self.write_s, 3)

    @asynccontextmanager
    async def commented(self, quiet_s: float, comment: bytes) -> AsyncIterator[None]:
        """A stream without output for ``quiet_s`` gets a ``comment``, while it
        ``is_between_events``: otherwise proxies would close it."""
        commenting = asyncio.create_task(self._comment_while_quiet(quiet_s, comment))
        self.is_between_events = True
        try:
            yield
        finally:
            commenting.cancel()

    def comment(self) -> None:
        """Now."""
        self._is_asked.set()

    async def _comment_while_quiet(self, quiet_s: float, comment: bytes) -> None:
        while True:
            left_s = self._written_s + quiet_s - time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s if left_s > 0 else quiet_s):
                    await self._is_asked.wait()
            is_due = self._is_asked.is_set() or time.monotonic() - self._written_s >= quiet_s
            self._is_asked.clear()
            if is_due and self.is_between_events and not self._request.protocol.writing_paused:
                with suppress(ConnectionError):
                    await self.write(comment)


CLIENT = web.RequestKey("client", Client)
"""The client of a request, once its status is sent."""
