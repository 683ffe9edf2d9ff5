"""Connections to other machines: tcp by libzmq, encrypted if there are keys."""

from functools import partial

from shared.link.hosts.libzmq import Protect, Socket, ZmqConnection, ZmqContext, ZmqListening
from shared.link.hosts.names import source_of
from shared.link.hosts.zap import Gatekeeper
from shared.link.keys import Keys
from shared.link.sockets.connection import OnFrames, OnLost, OtherHosts
from shared.link.sources import AddressSource
from shared.wire.messages import ServiceName


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
