"""The lower end of links: one bound ROUTER and its peers."""

import asyncio
import contextlib
import logging
from collections.abc import Collection
from pathlib import Path

from shared.address import ipc_address
from shared.codec import Array, encode
from shared.messages import Bye, Hello, Message, Refused, ServiceName
from shared.metrics import PEERS_REFUSED
from shared.peer import Peer, PeerEvents, count_sent, try_decode
from shared.sockets import Context, Frame, PeerGone, source_descriptor

log = logging.getLogger(__name__)


class Listener:
    """Accepts peers of ``services`` on a unix socket; ``events`` hears of them."""

    def __init__(
        self, context: Context, path: Path, services: Collection[ServiceName], events: PeerEvents
    ) -> None:
        self._path = path
        self._services = services
        self._events = events
        self._peers: dict[bytes, Peer] = {}
        self._routes: dict[Peer, bytes] = {}
        self._descriptors = _Descriptors()
        self._socket = context.socket("router", self._on_frames, self._on_lost)
        path.unlink(missing_ok=True)
        self._socket.bind(ipc_address(path))

    def close(self) -> None:
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def drop(self, peer: Peer, reason: str, is_lost: bool = True) -> None:
        """Ends the epoch of ``peer`` if it is one of ours; what it still sends is refused."""
        route = self._routes.pop(peer, None)
        if route is not None:
            del self._peers[route]
            self._descriptors.forget(route)
            self._events.down(peer, reason, is_lost)

    def _on_frames(self, frames: list[Frame]) -> None:
        route, views = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        peer = self._peers.get(route)
        decoded = try_decode(views, repr(peer))
        if peer is None:
            self._greet(route, decoded and decoded[0], source_descriptor(frames[0]))
        elif decoded is None:
            return
        elif isinstance(decoded[0], Bye):
            self.drop(peer, decoded[0].reason, is_lost=False)
        else:
            self._events.received(peer, *decoded, sum(map(len, views)))

    def _greet(self, route: bytes, hello: Message | None, descriptor: int) -> None:
        reason = self._events.refusal(hello, self._services)
        if reason is not None or not isinstance(hello, Hello):
            PEERS_REFUSED.inc()
            log.warning("refused a peer: %s", reason)
            self._answer(route, Refused(reason or ""))
            return
        peer = Peer(hello, self._send)
        replaced = self._descriptors.claim(descriptor, route)
        if replaced is not None:
            self.drop(self._peers[replaced], "disconnected")
        self._peers[route], self._routes[peer] = peer, route
        self._answer(route, self._events.hello)
        self._events.up(peer)

    def _on_lost(self, descriptor: int) -> None:
        route = self._descriptors.release(descriptor)
        if route is not None:
            self.drop(self._peers[route], "disconnected")

    def _send(self, peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        frames = encode(message, arrays)
        try:
            self._socket.send([self._routes[peer], *frames])
        except PeerGone:
            asyncio.get_running_loop().call_soon(self.drop, peer, "disconnected")
        else:
            count_sent(peer, message, frames)

    def _answer(self, route: bytes, message: Message) -> None:
        """To somebody who is no peer yet, and may be gone."""
        with contextlib.suppress(PeerGone):
            self._socket.send([route, *encode(message)])


class _Descriptors:
    """Which peer a ROUTER's connection belongs to, so that a disconnect is known at once.

    zmq names a lost connection by its file descriptor only, and the kernel may give the number to
    the next connection before we read of the loss. Then ``claim`` tells who is gone, and the event
    that is still on its way is not taken for the new owner's.
    """

    def __init__(self) -> None:
        self._owners: dict[int, bytes | None] = {}  # None: dropped, its event is still to come
        self._num_late_events: dict[int, int] = {}

    def claim(self, descriptor: int, route: bytes) -> bytes | None:
        """The owner that ``route`` replaces, which is gone, or None."""
        if descriptor in self._owners:
            self._num_late_events[descriptor] = self._num_late_events.get(descriptor, 0) + 1
        lost = self._owners.get(descriptor)
        self._owners[descriptor] = route
        return lost

    def release(self, descriptor: int) -> bytes | None:
        """The owner that a disconnect event speaks of, or None."""
        if self._num_late_events.get(descriptor, 0):
            self._num_late_events[descriptor] -= 1
            return None
        return self._owners.pop(descriptor, None)

    def forget(self, route: bytes) -> None:
        """``route`` was dropped for another reason; the connection may still be there."""
        for descriptor, owner in self._owners.items():
            if owner == route:
                self._owners[descriptor] = None
