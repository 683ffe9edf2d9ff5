"""What befalls the mesh, drawn from its seed."""

from collections.abc import Callable
from math import inf
from random import Random
from typing import NamedTuple

from shared.wire.messages import EVERY_LAYER, GROUPS_MINOR, STATES_MINOR
from tests.sim.mesh import KINDS, SETTLED_S, Host, Kind, Mesh
from tests.sim.network import LATENCY_S, Connection
from tests.sim.stores import DISK_S
from tests.sim.virtual_loop import THREAD_S, TURN_S, Process

MAX_TURNS = 300
"""A fault falls between two of so many callbacks of a service."""
OLD_MINORS = (3, 4, 5)
VICTIMS: dict[Kind, int] = {
    "gateway": 1,
    "tokenizer": 3,
    "scheduler": 4,
    "worker": 3,
    "encoder": 3,
}
"""How often which one. The requests of a dead gateway are lost, and show nothing."""
PAUSES_S = (0.003, 0.03, 0.3)


FAULTS = {
    "kill": 4,
    "stop": 4,
    "hang": 2,
    "cut": 2,
    "delay": 1,
    "bad_frame": 1,
    "slow": 1,
    "slow_threads": 1,
    "hang_step": 1,
    "fail_step": 1,
    "change_minor": 1,
    "jump": 1,
    "damage": 1,
    "break_store": 1,
    "break_disk": 1,
    "slow_disk": 1,
    "leave": 3,
    "lose_blocks": 1,
    "slow_blocks": 1,
}


class Hit(NamedTuple):
    """A fault of services of these ``kinds``. ``is_loss``: a process or a connection ends by it.
    At ``over_s`` the mesh knows that it was none."""

    at_s: float
    kinds: frozenset[str]
    is_loss: bool
    over_s: float


class Faults:
    """Each method named in ``FAULTS`` is one. Every run has some of them, and some strike one kind
    of service alone. ``hits`` are the ones that came."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._random: Random = mesh.random
        self.hits: list[Hit] = []
        num = self._random.choice([1, 2, 3, sum(FAULTS.values())])
        self._names = self._random.sample([*FAULTS], num, counts=FAULTS.values())
        self._kinds = self._random.choice([KINDS, KINDS, *((kind,) for kind in KINDS[1:])])
        self._prefers_busy = self._random.choice([0.0, 0.7, 1.0])
        self._pause_s = self._random.choice(PAUSES_S)

    def befall(self, num: int) -> None:
        """Begins a series of ``num``, one soon after the other."""
        if not self._mesh.live():
            return
        getattr(self, self._random.choice(self._names))()
        if num > 1:
            self._mesh.later(self._random.expovariate(1 / self._pause_s), self.befall, num - 1)

    def _victim(self, *kinds: Kind) -> Host:
        """Mostly one that holds work, if there is one of these ``kinds``."""
        hosts = self._mesh.live(*(kinds or self._kinds)) or self._mesh.live()
        if self._random.random() < self._prefers_busy:
            hosts = [each for each in hosts if any(each.held().values())] or hosts
        return self._random.choices(hosts, [VICTIMS[each.kind] for each in hosts])[0]

    def _note(self, text: str, *hosts: Process, is_loss: bool = False, over_s: float = inf) -> None:
        self._mesh.network.note(f"fault: {text}")
        kinds = frozenset(each.kind for each in hosts if isinstance(each, Host))
        self.hits.append(Hit(self._mesh.loop.now_s, kinds, is_loss, over_s))

    def _soon(self, host: Host, fault: Callable[[Host], None]) -> None:
        """At once, or between two of its next awaits."""
        num_turns = self._random.choice([0, self._random.randint(1, MAX_TURNS)])
        if num_turns:
            host.trap = host.num_turns + num_turns, lambda: fault(host)
        else:
            fault(host)

    # --- processes ------------------------------------------------------------------------------

    def kill(self) -> None:
        self._soon(self._victim(), self._kill)

    def _kill(self, host: Host) -> None:
        self._note(f"kill {host.name}", host, is_loss=True)
        is_silent, drops = self._random.random() < 0.2, self._random.random() < 0.5
        self._mesh.end(host, "is killed", is_silent, drops)

    def hang(self) -> None:
        self._soon(self._victim(), self._hang)

    def _hang(self, host: Host) -> None:
        duration_s = self._random.choice([0.3, 1.6, 2.2, 4.0]) * self._random.uniform(0.8, 1.2)
        host.free_s = max(host.free_s, self._mesh.loop.now_s + duration_s)
        text = f"{host.name} stands still for {duration_s:.3f} s"
        self._note(text, host, over_s=host.free_s + SETTLED_S)

    def slow(self) -> None:
        host = self._victim()
        self._note(f"{host.name} is slow", host)
        host.turn_s = self._random.choice([5e-4, 5e-3, 2e-2])
        self._later(setattr, host, "turn_s", TURN_S)

    def slow_threads(self) -> None:
        host = self._victim()
        self._note(f"the threads of {host.name} are slow", host)
        host.thread_s = max(host.pace_s, THREAD_S * self._random.choice([10, 100]))
        self._later(setattr, host, "thread_s", host.pace_s)

    def hang_step(self) -> None:
        host = self._victim("worker")
        if host.engine is not None:
            self._note(f"a step of {host.name} hangs", host, is_loss=True)
            host.may_break, host.thread_s = True, 1e3

    def fail_step(self) -> None:
        host = self._victim("worker")
        if host.engine is not None:
            self._note(f"a step of {host.name} fails", host, is_loss=True)
            host.may_break = host.engine.fails_next = True

    def stop(self) -> None:
        self._soon(self._victim(), self._stop)

    def _stop(self, host: Host) -> None:
        if not host.is_stopping:
            self._note(f"{host.name} is told to stop", host, is_loss=True)
            host.is_stopping = True
            host.stop_soon()

    def leave(self) -> None:
        self._soon(self._victim("worker"), self._stop)

    def change_minor(self) -> None:
        """Its next process speaks another minor version."""
        host = self._victim()
        host.site.minor = self._random.choice(OLD_MINORS)
        capacity = self._mesh.shape.capacity
        if host.kind == "scheduler" and capacity.groups != EVERY_LAYER:
            host.site.minor = GROUPS_MINOR  # workers with groups refuse older ones
        if host.kind == "scheduler" and capacity.num_states is not None:
            host.site.minor = STATES_MINOR
        self._stop(host) if self._random.random() < 0.5 else self._kill(host)

    def jump(self) -> None:
        host = self._victim()
        self._note(f"the wall clock of {host.name} jumps", host)
        host.wall_s += self._random.choice([-3600.0, -1.0, 1.0, 3600.0])

    def damage(self) -> None:
        """Some records of stores are lost."""
        self._note("stores are damaged")
        self._mesh.folders.damage(self._random)

    def break_store(self) -> None:
        host = self._victim("worker")
        if host.engine is not None and host.engine.own is not None:
            self._note(f"the store of {host.name} takes no more", host)
            host.engine.own.is_down = True

    def break_disk(self) -> None:
        self._note("the disks take no more")
        for each in self._mesh.folders.disks.values():
            each.is_down = True

    def slow_disk(self) -> None:
        self._note("the disks are slow")
        self._mesh.folders.disk_s = self._random.choice([5e-2, 0.5, 4.0])
        self._later(setattr, self._mesh.folders, "disk_s", DISK_S)

    def lose_blocks(self) -> None:
        host = self._victim("worker")
        self._note(f"the blocks that {host.name} pushes are lost", host)
        self._mesh.exchange.cut(host)

    def slow_blocks(self) -> None:
        self._note("blocks come late")
        self._mesh.exchange.delay_s = self._random.choice([5e-3, 5e-2, 0.5, 4.0])
        self._later(setattr, self._mesh.exchange, "delay_s", LATENCY_S)

    # --- connections ----------------------------------------------------------------------------

    def _connection(self) -> Connection | None:
        found = self._mesh.network.between(self._victim())
        return self._random.choice(found) if found else None

    def cut(self) -> None:
        if (connection := self._connection()) is not None:
            self._note(f"cut {connection}", *connection.machines, is_loss=True)
            connection.cut(self._random.random() < 0.4, self._random.random() < 0.7)

    def delay(self) -> None:
        if (connection := self._connection()) is not None:
            self._note(f"{connection} is slow", *connection.machines)
            connection.latency_s = self._random.choice([5e-3, 5e-2, 0.5])
            self._later(setattr, connection, "latency_s", LATENCY_S)

    def bad_frame(self) -> None:
        if (connection := self._connection()) is not None:
            self._note(f"a bad frame on {connection}", *connection.machines, is_loss=True)
            connection.spoils_next = True

    def _later(self, call: Callable[..., None], *arguments: object) -> None:
        self._mesh.later(self._random.uniform(0.1, 3), call, *arguments)
