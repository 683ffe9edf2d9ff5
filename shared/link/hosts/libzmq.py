"""Sockets of libzmq, read by callbacks on the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from shared.errors import ConfigError
from shared.link.hosts.router_connections import RouterConnection, RouterConnections
from shared.link.sockets.connection import (
    HELLO_S,
    LINGER_S,
    NO_MEMORY,
    OnFrames,
    OnLost,
    PeerGone,
)
from shared.link.tcp import BACKLOG
from shared.wire.codec import MAX_FRAME_BYTES, Frame

LINGER_MS = int(1000 * LINGER_S)
MAX_MESSAGES_A_TURN = 64
# Of one connection. Further messages wait at the sender, and are lost if it ends meanwhile; so
# this exceeds the messages that correct services send during a pause of a few seconds.
MAX_UNREAD_MESSAGES = 1024
MAX_MESSAGES_BEFORE_A_LOSS = 8 * MAX_UNREAD_MESSAGES
TCP_OPTIONS = {
    zmq.BACKLOG: BACKLOG,
    zmq.CONNECT_TIMEOUT: 5000,
    zmq.HANDSHAKE_IVL: 5000,
    # A host that vanished sends no end of its connections.
    zmq.HEARTBEAT_IVL: 2000,
    zmq.HEARTBEAT_TIMEOUT: 6000,
}

ReceivedFrame = zmq.Frame
Protect = Callable[["Socket"], None]
KINDS = {"router": zmq.ROUTER, "dealer": zmq.DEALER}
FAILED_HANDSHAKES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it broke off",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the key is not accepted",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "wrong bytes, keys on one side only, or of two sets",
}


class ZmqContext:
    """All sockets of libzmq in one process, which starts it with the first of them; ``close`` waits
    at most ``LINGER_S`` for queued messages."""

    def __init__(self) -> None:
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None

    def socket(
        self,
        kind: Literal["router", "dealer"],
        on_frames: Callable[[list[ReceivedFrame]], None],
        on_lost: Callable[[int, str], None],
        on_accepted: Callable[[int], None] | None = None,
    ) -> "Socket":
        """Raises OSError if the process has too many open files."""
        try:
            if self._zmq is None:
                # One IO thread: it reports a connection before it passes on messages that came
                # through it.
                self._zmq = zmq.Context(io_threads=1)
            with ExitStack() as on_error:
                socket = on_error.enter_context(self._zmq.socket(KINDS[kind]))
                made = Socket(socket, on_frames, on_lost, on_accepted)
                on_error.pop_all()
                return made
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None

    def close(self) -> None:
        if self._zmq is not None:
            self._zmq.destroy(linger=LINGER_MS)


class Socket:
    """One zmq socket that never reconnects and never blocks. Its peers are read in turn, so that
    only a peer that sends too much waits. Outgoing messages are queued without limit.

    ``on_frames`` gets each message; ``on_accepted`` the descriptor of a connection that another
    process made to us; ``on_lost`` the descriptor of one that ended or could not be made, and the
    reason for a failed handshake, else "".
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[ReceivedFrame]], None],
        on_lost: Callable[[int, str], None],
        on_accepted: Callable[[int], None] | None,
    ) -> None:
        socket.sndhwm = 0
        socket.rcvhwm = MAX_UNREAD_MESSAGES
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.reconnect_ivl = -1
        socket.linger = LINGER_MS  # now: a connection that fails uses the value of that moment
        if socket.type == zmq.ROUTER:
            socket.router_mandatory = True
        self.is_closed = False
        self._zmq = socket
        self._monitor = socket.get_monitor_socket(_watched(on_accepted is not None))
        self._on_lost = on_lost
        self._on_accepted = on_accepted
        self._failure = ""
        self._lost: deque[tuple[int, str]] = deque()
        self._messages = _Reader(socket, on_frames)
        self._events = _Reader(self._monitor, self._on_event)

    def admit_keys(self, secret: bytes, domain: str) -> None:
        """Encrypts later binds; the ZAP handler of ``domain`` admits or refuses."""
        self._zmq.curve_server = True
        self._zmq.curve_secretkey = secret
        self._zmq.zap_domain = domain.encode()
        self._zmq.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without its answer no peer is admitted

    def use_keys(self, secret: bytes, public: bytes, server: bytes) -> None:
        """Encrypts later connections, for the holder of the secret of ``server``."""
        self._zmq.curve_secretkey = secret
        self._zmq.curve_publickey = public
        self._zmq.curve_serverkey = server

    def bind(self, address: str) -> str:
        """The address with its real port. Raises ConfigError if it cannot be listened on."""
        try:
            self._prepare(address)
            self._zmq.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {address}: {error.strerror}") from None
        return str(self._zmq.get_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def connect(self, address: str) -> None:
        self._prepare(address)
        self._zmq.connect(address)

    def _prepare(self, address: str) -> None:
        if address.startswith("tcp://"):
            self._zmq.ipv6 = "[" in address or "*" in address
            for option, value in TCP_OPTIONS.items():
                self._zmq.set(option, value)

    def send(self, frames: Sequence[Frame]) -> None:
        """Queues a message without copying large frames. Raises PeerGone."""
        *others, last = frames
        try:
            for frame in others:
                self._zmq.send(frame, zmq.NOBLOCK | zmq.SNDMORE, copy=False)
            self._zmq.send(last, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # A ROUTER does not know the peer; a DEALER, with its endless queue, has lost its pipe.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            raise PeerGone from None
        finally:
            self._messages.wake()

    def read_events(self) -> None:
        """Calls ``on_accepted`` for all connections that messages have come through so far."""
        while self._events.read(MAX_MESSAGES_A_TURN):
            pass

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._messages.stop()
        self._events.stop()
        self._zmq.disable_monitor()
        self._monitor.close(linger=0)
        self._zmq.close()

    def _on_event(self, frames: list[ReceivedFrame]) -> None:
        event = parse_monitor_message([frame.bytes for frame in frames])
        kind, descriptor = event["event"], event["value"]
        if kind in FAILED_HANDSHAKES:  # the loss that follows names the connection
            self._failure = FAILED_HANDSHAKES[kind]
        elif kind == zmq.EVENT_ACCEPTED and self._on_accepted:
            self._on_accepted(descriptor)
        else:
            self._lost.append((descriptor, self._failure))
            self._failure = ""
            asyncio.get_running_loop().call_soon(self._deliver_lost)

    def _deliver_lost(self) -> None:
        """Messages that arrived before the loss are delivered first, up to a limit."""
        self._messages.read(MAX_MESSAGES_BEFORE_A_LOSS)
        if not self.is_closed:
            self._on_lost(*self._lost.popleft())


class _Reader:
    """Reads arriving messages, a bounded number of them a turn.

    A zmq descriptor is edge-triggered, so after calls on its socket we try to read once more in the
    same turn: that costs less than a check for unread messages each time.
    """

    def __init__(self, socket: Any, on_frames: Callable[[list[ReceivedFrame]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_frames = on_frames
        self._is_stopped = self._is_woken = False
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)
        self.wake()

    def wake(self) -> None:
        if not self._is_stopped and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._read)

    def stop(self) -> None:
        self._is_stopped = True
        self._loop.remove_reader(self._descriptor)

    def read(self, max_messages: int) -> bool:
        """True if there may be more."""
        return all(self._read_one() for _ in range(max_messages))

    def _read(self) -> None:
        self._is_woken = False
        if self.read(MAX_MESSAGES_A_TURN):
            self.wake()

    def _read_one(self) -> bool:
        if self._is_stopped:
            return False
        try:
            frames = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return False
        while frames[-1].more:
            frames.append(self._socket.recv(zmq.NOBLOCK, copy=False))
        self._on_frames(frames)
        return True


class ZmqConnection:
    """A DEALER on one address, for one epoch; see ``Connection``."""

    def __init__(
        self,
        context: ZmqContext,
        address: str,
        on_frames: OnFrames,
        on_lost: OnLost,
        protect: Protect | None,
    ) -> None:
        self.remote = address
        self.owner: str | None = None
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._socket = context.socket("dealer", self._receive, self._lose)
        if protect:
            protect(self._socket)
        self._socket.connect(address)

    @property
    def has_unsent(self) -> bool:
        return False  # the context lingers

    def send(self, frames: Sequence[Frame]) -> None:
        self._socket.send(frames)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, frames: list[ReceivedFrame]) -> None:
        try:
            self._on_frames(self, [frame.buffer for frame in frames])
        except MemoryError:
            self.close()
            self._on_lost(self, NO_MEMORY)

    def _lose(self, descriptor: int, failure: str) -> None:
        self._on_lost(self, failure and "it does not accept our key, or is not who it should be")


class ZmqListening:
    """A bound ROUTER and its connections. Raises ConfigError if it cannot be bound."""

    def __init__(
        self,
        context: ZmqContext,
        address: str,
        on_frames: OnFrames,
        on_lost: OnLost,
        protect: Protect | None,
    ) -> None:
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._connections = RouterConnections()
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket("router", self._receive, self._lose, self._accept)
        if protect:
            protect(self._socket)
        self.address = self._socket.bind(address)

    @property
    def has_unsent(self) -> bool:
        return False  # the context lingers

    def close(self) -> None:
        self._socket.close()

    def _accept(self, descriptor: int) -> None:
        self._loop.call_later(HELLO_S, _end_silent, self._connections.accepted(descriptor))

    def _receive(self, frames: list[ReceivedFrame]) -> None:
        route, *others = frames
        connection = self._connections.of_route(route.bytes)
        if connection is None:
            connection = self._meet(route)
        if connection is None:  # it was lost
            return
        try:
            self._on_frames(connection, [frame.buffer for frame in others])
        except MemoryError:
            connection.end()

    def _meet(self, route: ReceivedFrame) -> RouterConnection | None:
        self._socket.read_events()
        descriptor: Any = route.get(zmq.SRCFD)
        return self._connections.meet(
            int(descriptor), route.bytes, _owner_of_key(route), self._socket.send
        )

    def _lose(self, descriptor: int, failure: str) -> None:
        connection = self._connections.lost(descriptor)
        if connection is not None:
            self._on_lost(connection, failure)


def _end_silent(connection: RouterConnection) -> None:
    """One that has sent no Hello by now."""
    if connection.route is None:
        connection.end()


def _owner_of_key(frame: ReceivedFrame) -> str | None:
    """The user that ZAP named for the connection of ``frame``; None without keys."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return None


def raw_key(key: bytes) -> bytes:
    """The 32 bytes that the Z85 text ``key`` stands for."""
    return bytes(z85.decode(key))


def _watched(is_listening: bool) -> int:
    events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
    for failed in FAILED_HANDSHAKES:
        events |= failed
    return events | zmq.EVENT_ACCEPTED if is_listening else events
