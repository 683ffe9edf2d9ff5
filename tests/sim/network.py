"""Connections between processes in virtual time: frames arrive late, but in order; connections are
cut, and processes die without a word."""

from collections.abc import Callable, Sequence
from hashlib import blake2b

from shared.link.hosts.tcp import source_of
from shared.link.sockets.connection import HELLO_S, OnFrames, OnLost, PeerGone
from shared.link.sources import AddressSource
from shared.wire.codec import Frame, decode, encode
from shared.wire.messages import Hello, ServiceName
from tests.sim.images import without_images
from tests.sim.virtual_loop import START_S, Process, VirtualLoop

LATENCY_S = 100e-6
MOMENT_S = 1e-9  # between two messages of a connection
BAD_FRAME = b"\xc1"


class Machine(Process):
    """A process with an address, that speaks a ``minor`` of the protocol if it is given."""

    def __init__(self, name: str, address: str, minor: int | None = None) -> None:
        super().__init__(name)
        self.address = address
        self.minor = minor


class Network:
    """``log`` has a line for each message, if it ``is_logged``; ``digest`` is that of all."""

    def __init__(self, loop: VirtualLoop, is_logged: bool) -> None:
        self.loop = loop
        self.is_logged = is_logged
        self.log: list[str] = []
        self.num_messages = 0
        self._hash = blake2b(digest_size=16)
        self.listening: dict[str, Listening] = {}
        self.connections: list[Connection] = []

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def note(self, text: str) -> None:
        line = f"{self.loop.now_s - START_S:.6f} {text}"
        self._hash.update(line.encode())
        if self.is_logged:
            self.log.append(line)

    def note_message(self, sender: Machine, receiver: Machine, frames: list[bytes]) -> None:
        self.num_messages += 1
        self.note(f"{sender.name} → {receiver.name}")
        for frame in frames:
            self._hash.update(frame)
        if self.is_logged:
            self.log[-1] += f" {_text_of(frames)}"

    def between(self, one: Process, other: Process | None = None) -> "list[Connection]":
        """The connections of ``one``, or those with ``other``."""
        self.connections = [each for each in self.connections if not each.is_over]
        return [
            each
            for each in self.connections
            if one in each.machines and (other is None or other in each.machines)
        ]

    def end_all_of(self, machine: Machine, is_silent: bool, drops: bool) -> None:
        """``machine`` is dead. Its kernel says so, unless it ``is_silent``; ``drops``: what it had
        sent is lost."""
        self.listening = {
            key: each for key, each in self.listening.items() if each.machine is not machine
        }
        for connection in self.between(machine):
            connection.cut(is_silent=is_silent, drops=drops)


class Connection:
    """Between the ends ``dialer`` and ``accepted``."""

    def __init__(self, dialer: "End", accepted: "End") -> None:
        self.dialer, self.accepted = dialer, accepted
        self.machines = dialer.machine, accepted.machine
        self.latency_s = LATENCY_S
        self.spoils_next = False
        self.is_cut = self.drops = False
        dialer.connect(self, accepted)
        accepted.connect(self, dialer)

    def __repr__(self) -> str:
        return " – ".join(each.name for each in self.machines)

    @property
    def is_over(self) -> bool:
        return self.dialer.is_closed and self.accepted.is_closed

    def cut(self, is_silent: bool = False, drops: bool = True) -> None:
        """Nothing that is sent from now on arrives; ``is_silent``: nor does the news."""
        if not self.is_cut:
            self.is_cut, self.drops = True, drops
            for end in (self.dialer, self.accepted):
                if not is_silent:
                    end.schedule(end.lose, "")


class End:
    """One end of a connection, as its process sees it."""

    def __init__(
        self, network: Network, machine: Machine, on_frames: OnFrames, on_lost: OnLost
    ) -> None:
        self.network = network
        self.machine = machine
        self.owner: str | None = None
        self.remote = "somebody"
        self.has_unsent = False
        self.is_closed = self.is_lost = False
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._has_sent = self._has_spoken = False
        self._arrival_s = 0.0
        self._context = machine.context.copy()

    def connect(self, connection: Connection, other: "End") -> None:
        self._connection, self._other = connection, other
        self.remote = other.machine.name

    def schedule(self, callback: Callable[..., None], *arguments: object) -> None:
        """Calls back behind all that is on its way to this end."""
        loop = self.network.loop
        delay_s = self._connection.latency_s * loop.random.uniform(0.3, 3)
        self._arrival_s = max(self._arrival_s + MOMENT_S, loop.now_s + delay_s)
        self.after(self._arrival_s - loop.now_s, callback, *arguments)

    def after(self, delay_s: float, callback: Callable[..., None], *arguments: object) -> None:
        self.network.loop.call_later(delay_s, callback, *arguments, context=self._context)

    def send(self, frames: Sequence[Frame]) -> None:
        if self.is_closed or self.is_lost:
            raise PeerGone
        if self._connection.is_cut or self.machine.is_dead:
            return
        copies = [bytes(frame) for frame in frames]
        if self._connection.spoils_next:
            self._connection.spoils_next = False
            copies = [BAD_FRAME]
        if self.machine.minor is not None and not self._has_sent:
            copies = _with_minor(copies, self.machine.minor)
        self._has_sent = True
        self._other.schedule(self._other.receive, copies)

    def receive(self, frames: list[bytes]) -> None:
        if self.is_closed or (self._connection.is_cut and self._connection.drops):
            return
        self._has_spoken = True
        self.network.note_message(self._other.machine, self.machine, frames)
        self._on_frames(self, list(frames))

    def lose(self, failure: str) -> None:
        if not self.is_closed:
            self.is_closed = self.is_lost = True
            self._on_lost(self, failure)

    def end_silence(self) -> None:
        if not self._has_spoken:
            self.end()

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            if not self._connection.is_cut:
                self._other.schedule(self._other.lose, "")

    def end(self) -> None:
        if not self.is_closed:
            self.close()
            self._on_lost(self, "")


class Unanswered:
    """A dial that reaches nobody."""

    has_unsent = False

    def __init__(self, on_lost: OnLost, loop: VirtualLoop) -> None:
        self.remote, self.owner = "nobody", None
        self._timer = loop.call_later(LATENCY_S, on_lost, self, "")

    def send(self, frames: Sequence[Frame]) -> None: ...

    def close(self) -> None:
        self._timer.cancel()


class Listening:
    """A socket of ``machine`` that others connect to."""

    has_unsent = False

    def __init__(
        self, network: Network, machine: Machine, address: str, ends: tuple[OnFrames, OnLost]
    ) -> None:
        self.address = address
        self.machine = machine
        self._network = network
        self._ends = ends
        self._accepted: list[End] = []
        network.listening[address] = self

    def accept(self, dialer: End) -> None:
        accepted = End(self._network, self.machine, *self._ends)
        self._accepted = [each for each in self._accepted if not each.is_closed] + [accepted]
        self._network.connections.append(Connection(dialer, accepted))
        accepted.after(HELLO_S, accepted.end_silence)

    def close(self) -> None:
        if self._network.listening.get(self.address) is self:
            del self._network.listening[self.address]
        for end in self._accepted:
            end.close()


class Sockets:
    """Replaces ``SocketContext``: the sockets of the process that creates it."""

    def __init__(self, network: Network) -> None:
        self._network = network
        machine = network.loop.running
        assert isinstance(machine, Machine)
        self._machine = machine

    def listen(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> Listening:
        return Listening(self._network, self._machine, address, (on_frames, on_lost))

    def dial(
        self, address: str, on_frames: OnFrames, on_lost: OnLost, service: ServiceName
    ) -> End | Unanswered:
        listening = self._network.listening.get(address)
        if listening is None:
            return Unanswered(on_lost, self._network.loop)
        end = End(self._network, self._machine, on_frames, on_lost)
        listening.accept(end)
        return end

    def source(self, service: ServiceName, host: str, port: int) -> AddressSource:
        return source_of(host, port)

    def close(self) -> None: ...


def _with_minor(frames: list[bytes], minor: int) -> list[bytes]:
    hello, arrays = decode(frames)
    if not isinstance(hello, Hello):
        return frames
    return [bytes(each) for each in encode(without_images(hello, minor), arrays)]


def _text_of(frames: list[bytes]) -> str:
    if frames == [BAD_FRAME]:
        return "a bad frame"
    message, arrays = decode(list(frames))
    return f"{message} {[each.tolist() if each.size < 20 else each.size for each in arrays]}"
