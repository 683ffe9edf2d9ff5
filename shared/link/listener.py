"""The lower end of links: one socket that others connect to, and its peers."""

import asyncio
import contextlib
import logging

from shared.link.peer import Peer, PeerEvents, count_sent, try_decode
from shared.link.sockets.connection import LINGER_S, AcceptedConnection, PeerGone
from shared.link.sockets.context import SocketContext
from shared.process.log import LogOnce, peer_text
from shared.process.metrics import PEERS_REFUSED
from shared.wire.codec import Array, Frame, encode
from shared.wire.messages import Bye, Hello, Message, Refused, ServiceName

log = logging.getLogger(__name__)


class Listener:
    """Accepts peers of ``service`` on ``address`` and passes their events to ``events``.

    Raises ConfigError as ``SocketContext.listen``.
    """

    def __init__(
        self, context: SocketContext, address: str, service: ServiceName, events: PeerEvents
    ) -> None:
        self._service = service
        self._events = events
        self._peers: dict[AcceptedConnection, Peer] = {}
        self._connections: dict[Peer, AcceptedConnection] = {}
        self._met: set[AcceptedConnection] = set()
        self._refused: set[AcceptedConnection] = set()
        self._logged = LogOnce()
        self._socket = context.listen(address, self._on_frames, self._on_lost, service)
        self.address = self._socket.address

    @property
    def has_unsent(self) -> bool:
        return self._socket.has_unsent

    def close(self) -> None:
        self._socket.close()

    def drop(self, peer: Peer, reason: str, is_lost: bool = True) -> None:
        """Ends the epoch of ``peer`` and its connection, if it is one of ours."""
        connection = self._connections.pop(peer, None)
        if connection is not None:
            del self._peers[connection]
            self._events.down(peer, reason, is_lost)
            connection.end()

    def _on_frames(self, connection: AcceptedConnection, frames: list[Frame]) -> None:
        peer = self._peers.get(connection)
        if peer is None:
            self._on_stranger(connection, frames)
            return
        decoded = try_decode(frames, repr(peer))
        if decoded is None:
            self.drop(peer, "a bad message")
        elif isinstance(decoded[0], Bye):
            self.drop(peer, peer_text(decoded[0].reason), is_lost=False)
        else:
            self._events.received(peer, *decoded, sum(map(len, frames)))

    def _on_stranger(self, connection: AcceptedConnection, frames: list[Frame]) -> None:
        if connection in self._refused:  # it was answered, once
            return
        self._met.add(connection)
        decoded = try_decode(frames, connection.remote)
        hello = decoded and decoded[0]
        reason = _identity_mismatch(hello, connection.owner) or self._events.refusal(
            hello, self._service
        )
        if reason is None and isinstance(hello, Hello):
            self._greet(connection, hello)
        else:
            self._refused.add(connection)
            self._count_refused(connection, reason or "")
            _answer(connection, Refused(reason or "", self._events.hello.instance))
            asyncio.get_running_loop().call_later(LINGER_S, connection.end)

    def _greet(self, connection: AcceptedConnection, hello: Hello) -> None:
        peer = Peer(hello, self._send)
        self._peers[connection], self._connections[peer] = peer, connection
        _answer(connection, self._events.hello)
        self._events.up(peer)

    def _on_lost(self, connection: AcceptedConnection, failure: str) -> None:
        if connection in self._peers:
            self.drop(self._peers[connection], failure or "disconnected")
        elif connection not in self._met:
            reason = f"the handshake failed: {failure}" if failure else "it never sent Hello"
            self._count_refused(connection, reason)
        self._met.discard(connection)
        self._refused.discard(connection)

    def _count_refused(self, connection: AcceptedConnection, reason: str) -> None:
        """Logged once for each remote and reason, so that a port scan does not fill the log."""
        PEERS_REFUSED.inc()
        if self._logged.is_new(f"{connection.remote}: {reason}"):
            log.warning("%s: refused %s: %s", self.address, connection.remote, reason)

    def _send(self, peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        frames = encode(message, arrays)
        try:
            self._connections[peer].send(frames)
        except PeerGone:
            asyncio.get_running_loop().call_soon(self.drop, peer, "disconnected")
        else:
            count_sent(peer, message, frames)


def _answer(connection: AcceptedConnection, message: Message) -> None:
    """Sends to a connection that is no peer yet, and may be gone."""
    with contextlib.suppress(PeerGone):
        connection.send(encode(message))


def _identity_mismatch(hello: Message | None, owner: str | None) -> str | None:
    """An error if ``hello`` names another service than ``owner``, the service of its key."""
    if owner is None or not isinstance(hello, Hello) or hello.service == owner:
        return None
    return f"a {owner} key, but Hello names {hello.service}"
