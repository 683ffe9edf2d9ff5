"""Connections to other machines, and their addresses: tcp by libzmq, encrypted if there are
keys."""

import asyncio
import ipaddress
import socket
from contextlib import suppress
from functools import partial

from shared.link.endpoint import tcp_address
from shared.link.hosts.libzmq import (
    Protect,
    ReceivedFrame,
    Socket,
    ZmqConnection,
    ZmqContext,
    ZmqListening,
    raw_key,
)
from shared.link.keys import Keys
from shared.link.sockets.connection import OnFrames, OnLost, OtherHosts, PeerGone
from shared.link.sources import AddressSource, Failures
from shared.wire.messages import ServiceName

LOOKUP_S = 1.0


class TcpHosts(OtherHosts):
    def __init__(self, keys: Keys | None) -> None:
        self._keys = keys
        self._zmq = ZmqContext()
        self._gatekeeper = Gatekeeper(self._zmq, keys) if keys else None

    def listen(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> ZmqListening:
        protect: Protect | None = None
        if self._gatekeeper is not None:
            protect = partial(self._gatekeeper.guard, domain=f"{service}s", service=service)
        return ZmqListening(self._zmq, address, on_frames, on_lost, protect)

    def source(self, service: ServiceName, host: str, port: int) -> AddressSource:
        if self._keys is not None:
            self._keys.public_of(service)
        return source_of(host, port)

    def dial(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> ZmqConnection:
        protect: Protect | None = None
        if self._keys is not None:
            protect = partial(
                Socket.use_keys,
                secret=self._keys.secret,
                public=self._keys.public,
                server=self._keys.public_of(service),
            )
        return ZmqConnection(self._zmq, address, on_frames, on_lost, protect)

    def close(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._zmq.close()


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


ADDRESS = "inproc://zeromq.zap.01"
VERSION = b"1.0"  # of ZAP


class Gatekeeper:
    """Admits peers to the encrypted sockets of one ZmqContext by their keys: answers ZeroMQ's
    questions on the event loop, by ZAP 1.0 (ZeroMQ RFC 27). A domain is one of our listening
    sockets: it admits only the key of its service, and marks connections with its name."""

    def __init__(self, context: ZmqContext, keys: Keys) -> None:
        self._keys = keys
        self._admitted: dict[bytes, tuple[bytes, ServiceName]] = {}  # by domain
        self._socket = context.socket("router", self._on_frames, lambda *_: None)
        self._socket.bind(ADDRESS)

    def guard(self, socket: Socket, domain: str, service: ServiceName) -> None:
        """Reserves the later binds of ``socket`` for ``service``. Raises ConfigError without its
        key."""
        self._admitted[domain.encode()] = raw_key(self._keys.public_of(service)), service
        socket.admit_keys(self._keys.secret, domain)

    def close(self) -> None:
        self._socket.close()

    def _on_frames(self, frames: list[ReceivedFrame]) -> None:
        route, empty, version, request_id, domain, _, _, mechanism, *keys = (
            frame.bytes for frame in frames
        )
        key, service = self._admitted[domain]
        is_good = (version, mechanism, keys) == (VERSION, b"CURVE", [key])
        answer = [b"200", b"OK", service.encode()] if is_good else [b"400", b"unknown key", b""]
        with suppress(PeerGone):
            self._socket.send([route, empty, VERSION, request_id, *answer, b""])
