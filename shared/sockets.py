"""zmq sockets read by callbacks on the event loop; the only module that imports zmq."""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from shared.codec import MAX_FRAME_BYTES

LINGER_MS = 500
MAX_MESSAGES_A_TURN = 64

Frame = zmq.Frame
KINDS = {"router": zmq.ROUTER, "dealer": zmq.DEALER}


class PeerGone(Exception):
    """The connection of a send has ended, though we may not have read of it yet."""


class Context:
    """All sockets of one process; ``close`` waits at most ``LINGER_MS`` for what is queued."""

    def __init__(self) -> None:
        self._zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def socket(
        self,
        kind: Literal["router", "dealer"],
        on_frames: Callable[[list[Frame]], None],
        on_lost: Callable[[int], None],
    ) -> "Socket":
        return Socket(self._zmq.socket(KINDS[kind]), on_frames, on_lost)

    def close(self) -> None:
        self._zmq.destroy(linger=LINGER_MS)


class Socket:
    """One zmq socket that never reconnects and never blocks; high-water marks are off.

    ``on_frames`` gets each message; ``on_lost`` the descriptor of a connection that ended or was
    never made.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        on_frames: Callable[[list[Frame]], None],
        on_lost: Callable[[int], None],
    ) -> None:
        socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.reconnect_ivl = -1
        if socket.type == zmq.ROUTER:
            socket.router_mandatory = True
        self.is_closed = False
        self._zmq = socket
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        self._messages = _Reader(socket, on_frames)
        self._events = _Reader(self._monitor, self._on_event)
        self._on_lost = on_lost

    def bind(self, address: str) -> None:
        self._zmq.bind(address)

    def connect(self, address: str) -> None:
        self._zmq.connect(address)

    def send(self, frames: list[bytes | memoryview]) -> None:
        """Queues a message without copying large frames. Raises PeerGone."""
        try:
            self._zmq.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # A ROUTER does not know the peer; a DEALER, whose queue is endless, has lost its pipe.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            raise PeerGone from None
        finally:
            self._messages.wake()

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._messages.stop()
        self._events.stop()
        self._zmq.disable_monitor()
        self._monitor.close(linger=0)
        self._zmq.close(linger=LINGER_MS)

    def _on_event(self, frames: list[Frame]) -> None:
        """What arrived before the loss is delivered before it."""
        self._messages.drain()
        if not self.is_closed:
            self._on_lost(_event_value(frames))


class _Reader:
    """Takes what arrives, a bounded number of messages a turn.

    A zmq descriptor is edge-triggered, so it is looked at again after every call on its socket.
    """

    def __init__(self, socket: Any, on_frames: Callable[[list[Frame]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._on_frames = on_frames
        self._is_stopped = self._is_woken = False
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, self._read)
        self.wake()

    def wake(self) -> None:
        if not self._is_stopped and not self._is_woken and self._socket.events & zmq.POLLIN:
            self._is_woken = True
            self._loop.call_soon(self._read)

    def stop(self) -> None:
        self._is_stopped = True
        self._loop.remove_reader(self._descriptor)

    def drain(self) -> None:
        while self._read_one():
            pass

    def _read(self) -> None:
        self._is_woken = False
        for _ in range(MAX_MESSAGES_A_TURN):
            if not self._read_one():
                return
        self.wake()

    def _read_one(self) -> bool:
        if self._is_stopped:
            return False
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        self._on_frames(frames)
        return True


def source_descriptor(frame: Frame) -> int:
    """The descriptor of the connection that ``frame`` came through."""
    value: Any = frame.get(zmq.SRCFD)
    return int(value)


def _event_value(frames: list[Frame]) -> int:
    return parse_monitor_message([frame.bytes for frame in frames])["value"]
