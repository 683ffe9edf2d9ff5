"""ZeroMQ links: all the connections of one service.

The service below (scheduler below tokenizer, for one) listens with a ROUTER; each service above it
dials every address with a DEALER of its own. One connection is one epoch: Hello is the first
message either way, no routing id is set, nothing reconnects by itself, and the end of a connection
(by a disconnect, silence, a bad message, Bye, Refused) takes its Peer and its queued messages with
it. Nothing blocks and nothing is dropped: admission bounds memory, and a peer that sends more than
we read has to wait.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shared.errors import CodecError
from shared.link.address import ipc_address, socket_path
from shared.link.dialer import Dialer
from shared.link.endpoint import Endpoint, tcp_address
from shared.link.keys import Keys
from shared.link.listener import Listener
from shared.link.peer import SILENCE_S, Handler, Peer, count_bad
from shared.link.sockets.connection import LINGER_S
from shared.link.sockets.context import SocketContext
from shared.link.sources import AddressSource, SocketDirectory
from shared.process.log import peer_text
from shared.process.metrics import PEERS, PEERS_LOST
from shared.wire.codec import Array
from shared.wire.messages import (
    INSTANCE,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Bye,
    Heartbeat,
    Hello,
    Message,
    ServiceName,
    State,
)
from shared.wire.older import from_older

log = logging.getLogger(__name__)
MEMORY_S = 30.0
MAX_ENDED = 1024
HEARTBEAT_S = 0.5
STILL_S = SILENCE_S - 2 * HEARTBEAT_S  # a heartbeat so late may have been missed by peers
BYE_S = 0.1
FLUSH_S = 0.01


class EndedPeer(NamedTuple):
    """A peer whose connection has ended, kept for a while."""

    peer: Peer
    is_lost: bool  # it said no Bye
    ended_s: float  # monotonic


class EndedPeers:
    """Remembers each for ``MEMORY_S``, or until a process of that name is connected again."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], EndedPeer] = {}  # oldest first

    def add(self, peer: Peer, is_lost: bool, now_s: float) -> None:
        self.pop(peer)
        self._by_name = {_name(each.peer.hello): each for each in self.recent(now_s)}
        self._by_name[_name(peer.hello)] = EndedPeer(peer, is_lost, now_s)
        if len(self._by_name) > MAX_ENDED:
            del self._by_name[next(iter(self._by_name))]

    def pop(self, peer: Peer) -> EndedPeer | None:
        """Forgets the one of the same name, which it returns."""
        return self._by_name.pop(_name(peer.hello), None)

    def recent(self, now_s: float) -> Iterator[EndedPeer]:
        return (each for each in self._by_name.values() if now_s - each.ended_s <= MEMORY_S)


def _name(hello: Hello) -> tuple[str, str]:
    """One process may be reached by several addresses, and must not count twice."""
    return hello.service, hello.instance


class Link:
    """The peers of one service. Used on one event loop only.

    With ``keys`` all tcp is encrypted, and both ends prove which service they are; without keys
    tcp accepts any process. A peer that is not ready yet may be silent for ``loading_silence_s``,
    which its user may change.
    """

    def __init__(self, hello: Hello, handler: Handler, keys: Keys | None = None) -> None:
        self._hello = hello
        self.handler = handler
        self.peers: dict[Peer, None] = {}  # in the order of their Hellos
        self.ended = EndedPeers()
        self.was_ready = False
        self.loading_silence_s = SILENCE_S
        self._keys = keys
        self._context = SocketContext(keys)
        self._paths: list[Path] = []
        self._listeners: list[Listener] = []
        self._dialers: list[Dialer] = []
        self._last_state: State | None = None
        self._is_closing = False
        self._heartbeat_due_s = math.inf
        self._stood_still_s = -math.inf  # when that was last seen

    @property
    def hello(self) -> Hello:
        """Our first message, as of now."""
        still_until_s = self._still_until_s
        has_stood_still = still_until_s > -math.inf
        still_s = time.monotonic() - still_until_s if has_stood_still else None
        return replace(self._hello, still_s=still_s)

    @property
    def addresses(self) -> list[str]:
        """The addresses of all listeners."""
        return [listener.address for listener in self._listeners]

    def listen(
        self, directory: Path, service: ServiceName, role: str = "", tcp: str | None = None
    ) -> None:
        """Binds ``directory/<us>[.role]-<instance>.sock`` for peers of ``service``, and the address
        ``tcp``.

        Raises ConfigError for a path that is too long, an address that is not to be had, and a key
        that is missing.
        """
        path = socket_path(directory, self.hello.service, self.hello.instance, role)
        address = ipc_address(path)
        path.unlink(missing_ok=True)
        self._paths.append(path)
        self._listeners.append(Listener(self._context, address, service, self))
        if tcp is not None:
            endpoint = Endpoint.parse(tcp)
            address = tcp_address(endpoint.host, endpoint.port_of(self.hello.service, service))
            self._listeners.append(Listener(self._context, address, service, self))
            admitted = f"{service}s by their key" if self._keys else "any peer that sends Hello"
            log.info("listening on %s for %s", self.addresses[-1], admitted)

    def dial(
        self,
        service: ServiceName,
        directory: Path,
        role: str = "",
        tcp: Sequence[str] = (),
        takes_one: bool = False,
    ) -> None:
        """Connects to all present and future instances of ``service``, with ``takes_one`` to one at
        a time, while ``run`` runs: at the addresses ``tcp`` if given, else in ``directory``. Raises
        ConfigError for a missing key."""
        ends = [Endpoint.parse(each) for each in tcp]
        sources: list[AddressSource] = [
            self._context.source(service, end.host, end.port_of(service, self.hello.service))
            for end in ends
        ]
        sources = sources or [SocketDirectory(directory, service, role)]
        self._dialers.append(
            Dialer(
                context=self._context,
                service=service,
                sources=sources,
                events=self,
                takes_one=takes_one,
            )
        )

    async def run(self) -> None:
        """Dials, sends heartbeats and finds silent peers, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_heartbeats())
            for dialer in self._dialers:
                tasks.create_task(dialer.run())

    async def close(self, reason: str, is_planned: bool = True) -> None:
        """Ends all connections and accepts no more; nothing more is received. Peers get Bye only if
        the end ``is_planned``: to them a failed service is lost.

        zmq discards messages that a peer has not read when the connection ends, so it ends a little
        later.
        """
        self._is_closing = True
        for peer in self.peers:
            if is_planned:
                peer.send(Bye(reason))
            peer.is_up = False
        if self.peers and is_planned:
            await asyncio.sleep(BYE_S)
            await self._flush()
        for endpoint in self._endpoints():
            endpoint.close()
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._context.close()

    async def _flush(self) -> None:
        for _ in range(round(LINGER_S / FLUSH_S)):
            if any(each.has_unsent for each in self._endpoints()):
                await asyncio.sleep(FLUSH_S)

    @property
    def stood_still(self) -> bool:
        """True if peers may have dropped us for lack of heartbeats, until now or a moment ago. They
        then connect again, and were never gone."""
        return time.monotonic() - self._still_until_s < SILENCE_S

    @property
    def _still_until_s(self) -> float:
        """When we last stood still; minus infinity: never."""
        now_s = time.monotonic()
        return now_s if now_s - self._heartbeat_due_s > STILL_S else self._stood_still_s

    def refusal(self, hello: Message | None, service: ServiceName) -> str | None:
        if not isinstance(hello, Hello):
            return "the first message must be Hello"
        if hello.major != PROTOCOL_MAJOR:
            return f"protocol {hello.major} is not {PROTOCOL_MAJOR}"
        if hello.service != service:
            return f"a {hello.service} where only a {service} may be"
        if not re.fullmatch(INSTANCE, hello.instance):
            return f"an instance whose name is not {INSTANCE}"
        if self._is_closing:
            return f"{self.hello.service} {self.hello.instance} leaves"
        if any(_name(peer.hello) == _name(hello) for peer in self.peers):
            return f"{hello.service} {hello.instance} is connected already"
        reason = self.handler.refusal(hello)
        return None if reason is None else peer_text(reason)

    def up(self, peer: Peer) -> None:
        self.peers[peer] = None
        peer.stood_still = _has_outlived(peer.hello, self.ended.pop(peer), time.monotonic())
        PEERS.labels(peer.hello.service).inc()
        PEERS_LOST.labels(peer.hello.service)  # exported as 0 from here on
        minor = peer.hello.minor
        of_theirs = f", with protocol {PROTOCOL_MAJOR}.{minor}" if minor != PROTOCOL_MINOR else ""
        log.info("%s is up%s", peer, of_theirs)
        self.handler.on_up(peer)
        peer.send_heartbeat(self.handler.status())

    def received(self, peer: Peer, message: Message, arrays: list[Array], num_bytes: int) -> None:
        if self._is_closing:
            return
        peer.last_seen_s = time.monotonic()
        try:
            if isinstance(message, Heartbeat):
                self._on_heartbeat(peer, message)
            else:
                peer.count("in", num_bytes)
                message = from_older(message) if peer.is_older else message
                self.handler.on_message(peer, message, arrays)
        except CodecError as error:
            count_bad(repr(peer), error)
            self.drop(peer, f"a bad message: {peer_text(str(error))}")

    def _on_heartbeat(self, peer: Peer, heartbeat: Heartbeat) -> None:
        if peer.note_heartbeat(heartbeat):
            self.send_status(only_changes=True)

    def down(self, peer: Peer, reason: str, is_lost: bool) -> None:
        self.peers.pop(peer, None)
        if not peer.is_up:  # we sent Bye
            return
        peer.is_up, peer.is_explained = False, not is_lost or self.stood_still
        PEERS.labels(peer.hello.service).dec()
        if is_lost:
            PEERS_LOST.labels(peer.hello.service).inc()
        self.ended.add(peer, is_lost, time.monotonic())
        log.log(logging.WARNING if is_lost else logging.INFO, "%s is down: %s", peer, reason)
        self.handler.on_down(peer, reason)
        self.send_status(only_changes=True)

    def send_status(self, only_changes: bool = False) -> None:
        """Sends a heartbeat to every peer; with ``only_changes`` only if the state is another."""
        status = self.handler.status()
        if only_changes and status.state == self._last_state:
            return
        self._last_state = status.state
        self.was_ready = self.was_ready or status.state == State.READY
        for peer in list(self.peers):
            peer.send_heartbeat(status)

    async def _send_heartbeats(self) -> None:
        while True:
            due_s = self._heartbeat_due_s = time.monotonic() + HEARTBEAT_S
            await asyncio.sleep(HEARTBEAT_S)
            now_s = time.monotonic()
            if now_s - due_s > STILL_S:
                self._stood_still_s = now_s
            self._forgive_silence(now_s, now_s - due_s)
            self._drop_silent(now_s)
            self.send_status()

    def _forgive_silence(self, now_s: float, late_s: float) -> None:
        """Discounts our own pause of ``late_s``: the peers' messages may still be unread."""
        for peer in self.peers:
            peer.last_seen_s = min(peer.last_seen_s + late_s, now_s)

    def _drop_silent(self, now_s: float) -> None:
        for peer in list(self.peers):
            may_load = peer.status.state == State.NOT_READY
            limit_s = self.loading_silence_s if may_load else SILENCE_S
            if now_s - peer.last_seen_s > limit_s:
                self.drop(peer, f"silent for {limit_s:g} s")

    def drop(self, peer: Peer, reason: str) -> None:
        """Ends the epoch of ``peer`` at its endpoint."""
        for endpoint in self._endpoints():
            endpoint.drop(peer, reason)

    def _endpoints(self) -> list[Listener | Dialer]:
        return [*self._listeners, *self._dialers]


def _has_outlived(hello: Hello, ended: EndedPeer | None, now_s: float) -> bool:
    """True if the process of the ``ended`` epoch stood still then, or later."""
    if ended is None or not ended.is_lost or hello.still_s is None:
        return False
    return now_s - hello.still_s >= ended.ended_s - HEARTBEAT_S
