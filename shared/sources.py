"""Where a dialler finds the addresses of a service; each source keeps its own set current."""

import asyncio
import ipaddress
import logging
import socket
from pathlib import Path
from typing import Protocol

from shared.address import find_sockets, ipc_address
from shared.endpoint import tcp_address
from shared.messages import ServiceName

log = logging.getLogger(__name__)

LIST_S = 0.2
LOOKUP_S = 1.0


class Source(Protocol):
    """``addresses`` are ZeroMQ's, as of now; ``run`` keeps them current until cancelled."""

    addresses: set[str]

    async def run(self) -> None: ...


class Directory:
    """The sockets of a service in the mesh directory."""

    def __init__(self, directory: Path, service: ServiceName, role: str) -> None:
        self.addresses: set[str] = set()
        self._directory = directory
        self._service = service
        self._role = role

    async def run(self) -> None:
        while True:
            paths = find_sockets(self._directory, self._service, self._role)
            self.addresses = {ipc_address(path) for path in paths}
            await asyncio.sleep(LIST_S)


class Literal:
    """One address that never changes."""

    def __init__(self, host: str, port: int) -> None:
        self.addresses = {tcp_address(host, port)}

    async def run(self) -> None:
        pass


class Name:
    """All addresses of a host name, IPv4 and IPv6. While a lookup fails, those of the last one."""

    def __init__(self, host: str, port: int) -> None:
        self.addresses: set[str] = set()
        self._host = host
        self._port = port
        self._is_failing = False

    async def run(self) -> None:
        while True:
            await self._look_up()
            await asyncio.sleep(LOOKUP_S)

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter: a label that no name can have
            if not self._is_failing:
                log.warning("%s: no lookup: %s", self._host, error)
            self._is_failing = True
        else:
            self.addresses = {tcp_address(str(each[4][0]), self._port) for each in found}
            self._is_failing = False


def source_of(host: str, port: int) -> Source:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return Name(host, port)
    return Literal(host, port)
