"""The upper end of links: one DEALER per address of a service, each for one epoch."""

import asyncio
import logging
import time
from pathlib import Path

from shared.address import find_sockets, ipc_address
from shared.codec import Array, encode
from shared.messages import Bye, Hello, Message, Refused, ServiceName
from shared.metrics import PEERS_REFUSED
from shared.peer import SILENCE_S, Peer, PeerEvents, count_sent, try_decode
from shared.sockets import Context, Frame, PeerGone

log = logging.getLogger(__name__)

LOOKUP_S = 0.2
MAX_BACKOFF_S = 2.0


class Dialer:
    """Connects to every socket of ``service`` there is and there will be, with back-off for each.

    ``role`` names one of the sockets of a service that listens on several.
    """

    def __init__(
        self,
        context: Context,
        service: ServiceName,
        directory: Path,
        role: str,
        events: PeerEvents,
    ) -> None:
        self.context = context
        self.service = service
        self.events = events
        self._directory = directory
        self._role = role
        self._connections: dict[str, _Connection] = {}
        self._backoff: dict[str, _Backoff] = {}

    async def run(self) -> None:
        while True:
            self._dial_new(time.monotonic())
            await asyncio.sleep(LOOKUP_S)

    def _dial_new(self, now_s: float) -> None:
        paths = find_sockets(self._directory, self.service, self._role)
        addresses = {ipc_address(path) for path in paths}
        self._backoff = {key: backoff for key, backoff in self._backoff.items() if key in addresses}
        for connection in list(self._connections.values()):
            connection.check_greeting(now_s)
        for address in addresses - self._connections.keys():
            if address not in self._backoff or now_s >= self._backoff[address].until_s:
                self._connections[address] = _Connection(self, address)

    def drop(self, peer: Peer, reason: str, is_lost: bool = True) -> None:
        for connection in list(self._connections.values()):
            if connection.peer is peer:
                connection.end(reason, is_lost)

    def ended(self, address: str, was_up: bool) -> None:
        self._connections.pop(address, None)
        backoff = self._backoff.setdefault(address, _Backoff())
        backoff.prolong(time.monotonic(), was_up)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class _Backoff:
    def __init__(self) -> None:
        self.until_s = 0.0
        self._pause_s = LOOKUP_S

    def prolong(self, now_s: float, was_up: bool) -> None:
        self._pause_s = LOOKUP_S if was_up else min(2 * self._pause_s, MAX_BACKOFF_S)
        self.until_s = now_s + self._pause_s


class _Connection:
    """A DEALER on one address, for one epoch."""

    def __init__(self, dialer: Dialer, address: str) -> None:
        self._dialer = dialer
        self._events = dialer.events
        self._address = address
        self._started_s = time.monotonic()
        self.peer: Peer | None = None
        self._socket = dialer.context.socket("dealer", self._on_frames, self._on_lost)
        self._socket.connect(address)
        self._socket.send(encode(dialer.events.hello))

    def check_greeting(self, now_s: float) -> None:
        if self.peer is None and now_s - self._started_s > SILENCE_S:
            self.end("no Hello")

    def end(self, reason: str, is_lost: bool = True) -> None:
        if self._socket.is_closed:
            return
        self._socket.close()
        self._dialer.ended(self._address, was_up=self.peer is not None)
        if self.peer is not None:
            self._events.down(self.peer, reason, is_lost)

    def close(self) -> None:
        self._socket.close()

    def _on_lost(self, descriptor: int) -> None:
        self.end("disconnected")

    def _on_frames(self, frames: list[Frame]) -> None:
        views = [frame.buffer for frame in frames]
        decoded = try_decode(views, self._address)
        if decoded is None:
            return
        match decoded[0]:
            case Refused(reason):
                log.warning("%s refused us: %s", self._address, reason)
                self.end(f"refused: {reason}")
            case Bye(reason):
                self.end(reason, is_lost=False)
            case first if self.peer is None:
                self._greet(first)
            case _:
                self._events.received(self.peer, *decoded, sum(map(len, views)))

    def _greet(self, hello: Message) -> None:
        reason = self._events.refusal(hello, {self._dialer.service})
        if reason is not None or not isinstance(hello, Hello):
            PEERS_REFUSED.inc()
            log.warning("refused %s: %s", self._address, reason)
            self.end(f"refused: {reason}")
            return
        self.peer = Peer(hello, self._send)
        self._events.up(self.peer)

    def _send(self, peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        frames = encode(message, arrays)
        try:
            self._socket.send(frames)
        except PeerGone:
            asyncio.get_running_loop().call_soon(self.end, "disconnected")
        else:
            count_sent(peer, message, frames)
