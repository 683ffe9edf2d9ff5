"""The lower end of links: one bound ROUTER and its peers."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from shared.codec import Array, encode
from shared.log import peer_text
from shared.log_once import LogOnce
from shared.messages import Bye, Hello, Message, Refused, ServiceName
from shared.metrics import PEERS_REFUSED
from shared.peer import Peer, PeerEvents, count_sent, try_decode
from shared.router_connections import RouterConnection, RouterConnections
from shared.sockets import Context, PeerGone, ReceivedFrame, Socket, owner_of_key, source_descriptor

log = logging.getLogger(__name__)


class Listener:
    """Accepts peers of ``service`` on ``address`` and passes their events to ``events``.

    ``protect`` prepares the socket before it is bound. Raises ConfigError where it cannot be.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        service: ServiceName,
        events: PeerEvents,
        protect: Callable[[Socket], None] | None = None,
    ) -> None:
        self._service = service
        self._events = events
        self._peers: dict[bytes, Peer] = {}
        self._routes: dict[Peer, bytes] = {}
        self._connections = RouterConnections()
        self._refused = LogOnce()
        self._socket = context.socket(
            "router", self._on_frames, self._on_lost, self._connections.accepted
        )
        if protect:
            protect(self._socket)
        self.address = self._socket.bind(address)

    def close(self) -> None:
        self._socket.close()

    def drop(self, peer: Peer, reason: str, is_lost: bool = True) -> None:
        """Ends the epoch of ``peer`` if it is one of ours; what it still sends is refused."""
        route = self._routes.pop(peer, None)
        if route is not None:
            del self._peers[route]
            self._events.down(peer, reason, is_lost)

    def _on_frames(self, frames: list[ReceivedFrame]) -> None:
        route, views = frames[0].bytes, [frame.buffer for frame in frames[1:]]
        peer = self._peers.get(route)
        if peer is None:
            self._on_stranger(frames[0], views)
            return
        decoded = try_decode(views, repr(peer))
        if decoded is None:
            self.drop(peer, "a bad message")
        elif isinstance(decoded[0], Bye):
            self.drop(peer, peer_text(decoded[0].reason), is_lost=False)
        else:
            self._events.received(peer, *decoded, sum(map(len, views)))

    def _on_stranger(self, route: ReceivedFrame, views: list[memoryview]) -> None:
        self._socket.read_events()
        connection = self._connections.newest(source_descriptor(route))
        if connection is None:  # lost, and ``drop`` was called
            return
        if connection.refused_route == route.bytes:  # it was answered, once
            return
        connection.route = route.bytes
        decoded = try_decode(views, connection.remote)
        hello = decoded and decoded[0]
        reason = _identity_mismatch(hello, owner_of_key(route)) or self._events.refusal(
            hello, self._service
        )
        if reason is None and isinstance(hello, Hello):
            self._greet(route.bytes, hello)
        else:
            connection.refused_route = route.bytes
            self._count_refused(connection, reason or "")
            self._answer(route.bytes, Refused(reason or "", self._events.hello.instance))

    def _greet(self, route: bytes, hello: Hello) -> None:
        peer = Peer(hello, self._send)
        self._peers[route], self._routes[peer] = peer, route
        self._answer(route, self._events.hello)
        self._events.up(peer)

    def _on_lost(self, descriptor: int, failure: str) -> None:
        connection = self._connections.lost(descriptor)
        if connection is None:
            return
        if connection.route is None:
            reason = f"the handshake failed: {failure}" if failure else "it never sent Hello"
            self._count_refused(connection, reason)
        elif connection.route in self._peers:
            self.drop(self._peers[connection.route], "disconnected")

    def _count_refused(self, connection: RouterConnection, reason: str) -> None:
        """Logged once for each remote and reason, so that a port scan does not fill the log."""
        PEERS_REFUSED.inc()
        if self._refused.is_new(f"{connection.remote}: {reason}"):
            log.warning("%s: refused %s: %s", self.address, connection.remote, reason)

    def _send(self, peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        frames = encode(message, arrays)
        try:
            self._socket.send([self._routes[peer], *frames])
        except PeerGone:
            asyncio.get_running_loop().call_soon(self.drop, peer, "disconnected")
        else:
            count_sent(peer, message, frames)

    def _answer(self, route: bytes, message: Message) -> None:
        """Sends to a connection that is no peer yet, and may be gone."""
        with contextlib.suppress(PeerGone):
            self._socket.send([route, *encode(message)])


def _identity_mismatch(hello: Message | None, owner: str | None) -> str | None:
    """An error if ``hello`` names another service than ``owner``, whose key it came with."""
    if owner is None or not isinstance(hello, Hello) or hello.service == owner:
        return None
    return f"a {owner} key, but Hello names {hello.service}"
