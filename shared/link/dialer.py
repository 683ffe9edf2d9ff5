"""The upper end of links: one connection per address of a service, each for one epoch."""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from shared.link.peer import Peer, PeerEvents, count_sent, try_decode
from shared.link.sockets.connection import DialedConnection, PeerGone
from shared.link.sockets.context import SocketContext
from shared.link.sources import AddressSource
from shared.process.log import LogOnce, peer_text
from shared.process.metrics import DIALS_FAILED, PEERS_REFUSED
from shared.wire.codec import Array, Frame, encode
from shared.wire.messages import Bye, Hello, Message, Refused, ServiceName

log = logging.getLogger(__name__)

TURN_S = 0.2
MAX_BACKOFF_S = 2.0
GREETING_S = 5.0
GREETING_LOOKS = round(GREETING_S / TURN_S)  # counted, for we may stand still ourselves


class Dialer:
    """Connects to every address of ``service`` that ``sources`` find, with back-off for each.

    A connection outlives its address: only the other end, or silence, ends it. With ``takes_one``
    no other address is dialled while one peer is up, and all at once when that peer is down.
    """

    def __init__(
        self,
        context: SocketContext,
        service: ServiceName,
        sources: Sequence[AddressSource],
        events: PeerEvents,
        takes_one: bool = False,
    ) -> None:
        self.context = context
        self.service = service
        self.events = events
        self._sources = sources
        self._takes_one = takes_one
        self._connections: dict[str, _Epoch] = {}
        self._attempts: dict[str, _Attempts] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for source in self._sources:
                tasks.create_task(source.run())
            while True:
                self._dial_new(time.monotonic())
                await asyncio.sleep(TURN_S)

    def _dial_new(self, now_s: float) -> None:
        for connection in list(self._connections.values()):
            connection.look()
        addresses = set().union(*(source.addresses for source in self._sources))
        known = addresses | self._connections.keys()
        self._attempts = {key: each for key, each in self._attempts.items() if key in known}
        connected = {each.peer.hello.instance for each in self._connections.values() if each.peer}
        if connected and self._takes_one:
            return
        for address in sorted(addresses - self._connections.keys()):
            attempts = self._attempts.setdefault(address, _Attempts())
            if attempts.refused_by not in connected and now_s >= attempts.pause_until_s:
                self._dial(address)

    def _dial(self, address: str) -> None:
        try:
            self._connections[address] = _Epoch(self, address)
        except OSError as error:
            self.ended(address, was_up=False, reason=f"cannot be dialled: {error.strerror}")

    def drop(self, peer: Peer, reason: str, is_lost: bool = True) -> None:
        for connection in list(self._connections.values()):
            if connection.peer is peer:
                connection.end(reason, is_lost)

    def refused(self, address: str, instance: str) -> None:
        """While we are connected to that process by another address, this one is left alone."""
        self._attempts[address].refused_by = instance

    def ended(self, address: str, was_up: bool, reason: str) -> None:
        self._connections.pop(address, None)
        attempts = self._attempts[address]
        if not was_up:
            DIALS_FAILED.inc()
            if attempts.failures.is_new(reason):
                log.warning("%s: %s", address, reason)
        attempts.ended(time.monotonic(), was_up)

    @property
    def has_unsent(self) -> bool:
        return any(each.has_unsent for each in self._connections.values())

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class _Attempts:
    """The results of dialling one address since it was last up."""

    def __init__(self) -> None:
        self.pause_until_s = 0.0
        self.failures = LogOnce()
        self.refused_by = ""  # the instance that last did
        self._pause_s = TURN_S

    def ended(self, now_s: float, was_up: bool) -> None:
        if was_up:
            self.failures = LogOnce()
        self._pause_s = TURN_S if was_up else min(2 * self._pause_s, MAX_BACKOFF_S)
        self.pause_until_s = now_s + self._pause_s


class _Epoch:
    """A connection to one address, until it ends."""

    def __init__(self, dialer: Dialer, address: str) -> None:
        self._dialer = dialer
        self._events = dialer.events
        self._address = address
        self._num_looks = 0
        self.peer: Peer | None = None
        self._is_over = False
        self._connection: DialedConnection = dialer.context.dial(
            address, self._on_frames, self._on_lost, dialer.service
        )
        with suppress(PeerGone):  # on_lost follows
            self._connection.send(encode(dialer.events.hello))

    def look(self) -> None:
        """Ends it if the other end has sent no Hello for too long."""
        self._num_looks += 1
        if self.peer is None and self._num_looks > GREETING_LOOKS:
            self.end("no Hello")

    def end(self, reason: str, is_lost: bool = True) -> None:
        if self._is_over:
            return
        self.close()
        self._dialer.ended(self._address, self.peer is not None, reason)
        if self.peer is not None:
            self._events.down(self.peer, reason, is_lost)

    @property
    def has_unsent(self) -> bool:
        return self._connection.has_unsent

    def close(self) -> None:
        self._is_over = True
        self._connection.close()

    def _on_lost(self, connection: DialedConnection, failure: str) -> None:
        if self.peer:
            self.end(failure or "disconnected")
        else:
            self.end(f"no handshake: {failure}" if failure else "no connection")

    def _on_frames(self, connection: DialedConnection, frames: list[Frame]) -> None:
        decoded = try_decode(frames, self._address)
        if decoded is None:
            self.end("a bad message")
            return
        match decoded[0]:
            case Refused(reason, instance):
                self._dialer.refused(self._address, instance)
                self.end(f"refused us: {peer_text(reason)}")
            case Bye(reason):
                self.end(peer_text(reason), is_lost=False)
            case first if self.peer is None:
                self._greet(first)
            case _:
                self._events.received(self.peer, *decoded, sum(map(len, frames)))

    def _greet(self, hello: Message) -> None:
        reason = self._events.refusal(hello, self._dialer.service)
        if reason is not None or not isinstance(hello, Hello):
            PEERS_REFUSED.inc()
            self.end(f"refused by us: {reason}")
            return
        self.peer = Peer(hello, self._send)
        self._events.up(self.peer)

    def _send(self, peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        frames = encode(message, arrays)
        try:
            self._connection.send(frames)
        except PeerGone:
            asyncio.get_running_loop().call_soon(self.end, "disconnected")
        else:
            count_sent(peer, message, frames)
