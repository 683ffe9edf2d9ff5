"""A connection of a client until its handshake of TLS is done."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from services.gateway.http.connection_limit import ConnectionLimit
from services.gateway.metrics import SHED_CONNECTIONS
from shared.errors import Unavailable


class TlsHandshake(asyncio.Protocol):
    """Counts among ``connections``, and hands over to a protocol of ``factory``."""

    def __init__(
        self,
        factory: Callable[[], asyncio.Protocol],
        connections: ConnectionLimit,
        tls: ssl.SSLContext,
        timeout_s: float,
    ) -> None:
        self.refusal: Unavailable | None = None  # only who comes after the handshake can answer
        self._factory = factory
        self._connections = connections
        self._tls = tls
        self._timeout_s = timeout_s
        self._transport: Any  # uvloop's is no asyncio.Transport
        self._received = b""
        self._is_lost = False

    @property
    def is_idle(self) -> bool:
        return True

    @property
    def descriptor(self) -> int:
        return int(self._transport.get_extra_info("socket").fileno())

    def shed(self, reason: str) -> None:
        SHED_CONNECTIONS.labels(reason).inc()
        self._connections.remove(self)
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._connections.add(self)
        if not transport.is_closing():
            self._task = asyncio.get_running_loop().create_task(self._hand_over())

    def data_received(self, data: bytes) -> None:
        """Deciphered, and perhaps before ``start_tls`` returns."""
        self._received += data

    def connection_lost(self, exc: BaseException | None) -> None:
        self._is_lost = True
        self._connections.remove(self)

    async def _hand_over(self) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self._tls,
                server_side=True,
                ssl_handshake_timeout=self._timeout_s,
            )
        except OSError:  # late, broken off, or no TLS at all
            return
        finally:
            self._connections.remove(self)
        if secured is None or self._is_lost or self._transport.is_closing():
            return
        protocol = self._factory()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        if self._received:
            protocol.data_received(self._received)
