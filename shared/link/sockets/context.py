"""Chooses the transport of a connection by its address."""

from pathlib import Path

from shared.link.hosts.tcp import TcpHosts
from shared.link.keys import Keys
from shared.link.sockets import local
from shared.link.sockets.connection import (
    DialedConnection,
    Listening,
    OnFrames,
    OnLost,
    OtherHosts,
)
from shared.link.sockets.local import LocalListening
from shared.link.sources import AddressSource
from shared.wire.messages import ServiceName

IPC = "ipc://"
HOSTS: tuple[type[OtherHosts], ...] = (
    TcpHosts,
    OtherHosts,
)
"""The first one is used."""


class SocketContext:
    """All sockets of one process: local sockets on the event loop, and tcp with ``keys``."""

    def __init__(self, keys: Keys | None) -> None:
        self._hosts = HOSTS[0](keys)

    def listen(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> Listening:
        """As ``OtherHosts.listen``."""
        if address.startswith(IPC):
            return LocalListening(Path(address.removeprefix(IPC)), on_frames, on_lost)
        return self._hosts.listen(address, on_frames, on_lost, service)

    def source(self, service: ServiceName, host: str, port: int) -> AddressSource:
        """As ``OtherHosts.source``."""
        return self._hosts.source(service, host, port)

    def dial(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> DialedConnection:
        """Raises OSError if a connection is impossible, as far as that is known at once."""
        if address.startswith(IPC):
            return local.dial(Path(address.removeprefix(IPC)), on_frames, on_lost)
        return self._hosts.dial(address, on_frames, on_lost, service)

    def close(self) -> None:
        self._hosts.close()
