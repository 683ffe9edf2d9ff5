"""Admits peers to encrypted sockets by their keys: answers ZeroMQ's questions about connections.

ZAP 1.0 (ZeroMQ RFC 27) for the CURVE mechanism. A domain is one of our listening sockets: it admits
only the key of its service, and marks connections with the service's name.
"""

from contextlib import suppress

from shared.link.hosts.libzmq import ReceivedFrame, Socket, ZmqContext, raw_key
from shared.link.keys import Keys
from shared.link.sockets.connection import PeerGone
from shared.wire.messages import ServiceName

ADDRESS = "inproc://zeromq.zap.01"
VERSION = b"1.0"


class Gatekeeper:
    """Answers for all sockets of one ZmqContext, on the event loop."""

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
