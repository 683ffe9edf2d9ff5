"""Chooses the transport of a connection by its address."""

from pathlib import Path

from shared.link.sockets import local
from shared.link.sockets.connection import DialedConnection, Listening, OnFrames, OnLost
from shared.link.sockets.libzmq import Protect, ZmqConnection, ZmqContext, ZmqListening
from shared.link.sockets.local import LocalListening

IPC = "ipc://"


class SocketContext:
    """All sockets of one process: local sockets on the event loop, tcp by libzmq.

    ``protect`` prepares a socket of tcp before it is bound or connected.
    """

    def __init__(self) -> None:
        self.zmq = ZmqContext()

    def listen(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, protect: Protect | None = None
    ) -> Listening:
        """Raises ConfigError for an address that is not to be had."""
        if address.startswith(IPC):
            return LocalListening(Path(address.removeprefix(IPC)), on_frames, on_lost)
        return ZmqListening(self.zmq, address, on_frames, on_lost, protect)

    def dial(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, protect: Protect | None = None
    ) -> DialedConnection:
        """Raises OSError if a connection is impossible, as far as that is known at once."""
        if address.startswith(IPC):
            return local.dial(Path(address.removeprefix(IPC)), on_frames, on_lost)
        return ZmqConnection(self.zmq, address, on_frames, on_lost, protect)

    def close(self) -> None:
        self.zmq.close()
