"""aiohttp's connection with deadlines, and support for clients that close only their own side."""

import asyncio
import logging
import math
import socket
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.streams import StreamReader

from services.gateway.http.client import CLIENT
from services.gateway.http.connection_limit import ConnectionLimit
from services.gateway.http.failures import error_response
from services.gateway.http.head_parser import CONTINUE, HeadParser, fault_of
from services.gateway.http.log_limit import LogLimit
from services.gateway.metrics import HTTP_REQUESTS, SHED_CONNECTIONS, SLOW_CLIENTS
from shared.errors import InternalError, Unavailable

log = logging.getLogger(__name__)
log.addFilter(LogLimit())

STEP_BYTES = 64 << 10
"""Fewer bytes in a period are too few, so that an occasional byte does not keep a connection."""


class ReadingCheck:
    """A client is late if within ``period_s`` it reads neither all of the sent bytes nor
    ``STEP_BYTES`` of them. Pure; times are monotonic."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._began_s: float | None = None
        self._read_before = 0

    def is_late(self, num_written: int, num_unread: int, now_s: float) -> bool:
        """``num_written`` counts all bytes since the connection began."""
        num_read = num_written - num_unread
        if num_unread == 0:
            self._began_s = None
        elif self._began_s is None or num_read - self._read_before >= STEP_BYTES:
            self._began_s, self._read_before = now_s, num_read
        return self._began_s is not None and now_s - self._began_s >= self.period_s


LOOKS_A_PERIOD = 4
"""The number of checks in slow-client-s that a client reads."""
LOOK_S = 0.1
"""The interval of the check that a client which sends no more is still there."""
TCP_CLOSE = 7  # of the kernel: also the state of a connection that was reset


class HttpConnection(web.RequestHandler):
    """Closes a connection without a complete request head within ``header_timeout_s``, measured
    from its beginning or from the first byte of a later request. Aborts one with a client that is
    late by ``reading``, regardless of the writer and of a pending close.

    A client may close its side after sending its request, and still gets its answer. That looks
    like a client that left, until something is written to it: so something is written, every
    ``probe_s``.
    """

    __slots__ = (
        "_can_probe",
        "_connections",
        "_header_timeout_s",
        "_is_half_closed",
        "_num_written_before",
        "_payload",
        "_probe_s",
        "_probed_s",
        "_reading",
        "_reading_timer",
        "_stream",
        "_timer",
        "_writer",
        "refusal",
    )

    def __init__(
        self,
        manager: web.Server,
        connections: ConnectionLimit,
        header_timeout_s: float,
        probe_s: float,
        reading: ReadingCheck,
        **options: Any,
    ) -> None:
        super().__init__(manager, **options)
        self._parser: HeadParser | None = HeadParser(self._parser)  # type: ignore[assignment]
        self.refusal: Unavailable | None = None
        self._connections = connections
        self._header_timeout_s = header_timeout_s
        self._probe_s = probe_s
        self._probed_s = -math.inf
        self._payload: StreamReader | None = None  # of the last request
        self._can_probe = False
        self._is_half_closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._reading = reading
        self._reading_timer: asyncio.TimerHandle | None = None
        self._stream: asyncio.Transport | None = None  # until it is lost, not only until it closes
        self._writer: AbstractStreamWriter | None = None  # of the last request
        self._num_written_before = 0  # by the writers before it

    @property
    def is_idle(self) -> bool:
        is_waiting = self._waiter is not None and not self._waiter.done()
        return is_waiting or self._payload is None

    @property
    def descriptor(self) -> int:
        return int(self._socket.fileno())

    def shed(self, reason: str) -> None:
        SHED_CONNECTIONS.labels(reason).inc()
        self._connections.remove(self)
        transport = self.transport
        self.force_close()
        if transport is not None:  # to close TLS may take as long as the client likes, up to 30 s
            transport.abort()

    def begin_request(self, writer: AbstractStreamWriter) -> None:
        """The answer of a request will go to ``writer``."""
        if self._writer is not None:
            self._num_written_before += self._writer.output_size
        self._writer = writer
        if self._reading_timer is None:
            self._look_again()

    def end_request(self) -> None:
        """The answer of a request is known."""
        self._connections.note_end_of_request(self)
        if self._is_half_closed and not self._messages:
            self.close()

    # --- called by the transport ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._stream = self.transport
        self._await_head()
        self._connections.add(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        self._stop_timer()
        if self._reading_timer is not None:
            self._reading_timer.cancel()
        self._stream = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        num_requests = self._request_count
        try:
            super().data_received(data)
        except MemoryError:
            log.warning("%s is closed: there is no memory for what it sent", self.peername)
            self._end_broken()
            return
        if self._parser is not None and self._parser.is_broken:
            self._end_broken()
        if self._request_count > num_requests:
            message, self._payload = self._messages[-1]
            self._can_probe = getattr(message, "version", HttpVersion11) >= HttpVersion11
            self._stop_timer()
        elif self._timer is None and self.is_idle:
            self._await_head()

    def _end_broken(self) -> None:
        """Later bytes cannot be understood; requests received before are answered."""
        if self.is_idle and not self._messages:
            self.force_close()
        else:
            self.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open, until all requests are answered."""
        has_asked = not self.is_idle and self._payload is not None and self._payload.is_eof()
        is_tcp = self._socket is not None and self._socket.family != socket.AF_UNIX
        if not has_asked or not self._can_probe or self.ssl_context is not None or not is_tcp:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._timer = self._loop.call_later(LOOK_S, self._look)
        if not self._messages:
            self.close()  # after the answer
        return True

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        fault = fault_of(exc)
        HTTP_REQUESTS.labels("unknown", fault.status).inc()
        if isinstance(fault, InternalError):
            log.error("a request of %s broke", request.remote, exc_info=exc)
        else:
            log.info("%s is refused: %s", request.remote, fault.message)
        if request.writer.output_size:
            raise ConnectionResetError("an answer has begun")
        response = error_response(fault)
        response.force_close()
        return response

    # --- deadlines ------------------------------------------------------------------------------

    def _await_head(self) -> None:
        self._timer = self._loop.call_later(self._header_timeout_s, self._end_late)

    def _end_late(self) -> None:
        self._timer = None
        if self.is_idle:
            self.shed("late")

    def _stop_timer(self) -> None:
        if self._timer is not None and not self._is_half_closed:
            self._timer.cancel()
            self._timer = None

    # --- a client that does not read ------------------------------------------------------------

    def _look_again(self) -> None:
        look_s = self._reading.period_s / LOOKS_A_PERIOD
        self._reading_timer = self._loop.call_later(look_s, self._look_at_reading)

    def _look_at_reading(self) -> None:
        self._reading_timer = None
        if self._stream is None or self._writer is None:
            return
        num_unread = self._stream.get_write_buffer_size()
        num_written = self._num_written_before + self._writer.output_size
        if self._reading.is_late(num_written, num_unread, self._loop.time()):
            self._end_slow(self._stream, num_unread)
        elif num_unread or not self.is_idle:
            self._look_again()

    def _end_slow(self, stream: asyncio.Transport, num_unread: int) -> None:
        SLOW_CLIENTS.inc()
        log.warning(
            "%s is cut off: it left %d bytes unread for slow-client-s = %g s",
            *(stream.get_extra_info("peername"), num_unread, self._reading.period_s),
        )
        stream.abort()

    # --- a client that sends no more ------------------------------------------------------------

    def _look(self) -> None:
        if self.transport is None:
            return
        if self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE:
            self.transport.abort()
            return
        self._probe()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def _probe(self) -> None:
        request, now_s = self._current_request, self._loop.time()
        if request is None or self.transport is None or now_s - self._probed_s < self._probe_s:
            return
        self._probed_s = now_s
        if (client := request.get(CLIENT)) is not None:
            client.comment()
        elif not request.writer.output_size:
            self.transport.write(CONTINUE)

    @property
    def _socket(self) -> Any:
        return self.transport.get_extra_info("socket") if self.transport is not None else None
