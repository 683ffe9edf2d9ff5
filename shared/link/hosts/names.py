"""Addresses of services on other machines."""

import asyncio
import ipaddress
import socket

from shared.link.endpoint import tcp_address
from shared.link.sources import AddressSource, Failures

LOOKUP_S = 1.0


class FixedAddress:
    """One address that never changes."""

    def __init__(self, host: str, port: int) -> None:
        self.addresses = {tcp_address(host, port)}

    async def run(self) -> None:
        pass


class HostName:
    """All addresses of a host name, IPv4 and IPv6. While a lookup fails, the last known ones."""

    def __init__(self, host: str, port: int) -> None:
        self.addresses: set[str] = set()
        self._host = host
        self._port = port
        self._failures = Failures()

    async def run(self) -> None:
        while True:
            await self._look_up()
            await asyncio.sleep(LOOKUP_S)

    async def _look_up(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:  # the latter: a label that no name can have
            self._failures.count(f"{self._host}: no lookup: {error}")
        else:
            self.addresses = {tcp_address(str(each[4][0]), self._port) for each in found}
            self._failures.end()


def source_of(host: str, port: int) -> AddressSource:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return HostName(host, port)
    return FixedAddress(host, port)
