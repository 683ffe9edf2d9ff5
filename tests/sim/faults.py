"""What befalls the mesh, drawn from its seed."""

from collections.abc import Callable
from random import Random

from tests.sim.mesh import ORDER, Host, Mesh
from tests.sim.network import LATENCY_S, Connection
from tests.sim.virtual_loop import THREAD_S, TURN_S

MAX_TURNS = 300
"""A fault falls between two of so many callbacks of a service."""
OLD_MINORS = (3, 4, 5)


WEIGHTS = {
    "kill": 4,
    "kill_between_awaits": 6,
    "hang": 3,
    "hang_between_awaits": 3,
    "slow": 2,
    "slow_threads": 2,
    "hang_step": 1,
    "fail_step": 1,
    "cut": 3,
    "delay": 3,
    "bad_frame": 2,
    "stop": 4,
    "jump": 1,
    "change_minor": 1,
}


class Faults:
    """Each method named in ``WEIGHTS`` is one; ``hits`` are the times at which they came."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._random: Random = mesh.random
        self.hits: list[tuple[float, bool]] = []
        self._likes = [weight * self._random.choice([0, 1, 1, 4]) for weight in WEIGHTS.values()]

    def befall(self) -> None:
        (name,) = self._random.choices([*WEIGHTS, "kill"], [*self._likes, 0.1])
        getattr(self, name)()

    def _victim(self) -> Host:
        """Of any service with the same chance."""
        kind = self._random.choice(ORDER)
        hosts = self._mesh.live(kind) or self._mesh.live()
        return self._random.choice(hosts)

    def _note(self, text: str, is_loss: bool = False) -> None:
        """``is_loss``: a process or a connection ends by it."""
        self._mesh.network.note(f"fault: {text}")
        self.hits.append((self._mesh.loop.now_s, is_loss))

    def _trap(self, host: Host, spring: Callable[[], None]) -> None:
        host.trap = host.num_turns + self._random.randint(1, MAX_TURNS), spring

    # --- processes ------------------------------------------------------------------------------

    def kill(self, host: Host | None = None) -> None:
        host = host or self._victim()
        self._note(f"kill {host.name}", is_loss=True)
        is_silent, drops = self._random.random() < 0.2, self._random.random() < 0.5
        self._mesh.end(host, "is killed", is_silent, drops)

    def kill_between_awaits(self) -> None:
        host = self._victim()
        self._trap(host, lambda: self.kill(host))

    def hang(self, host: Host | None = None) -> None:
        host = host or self._victim()
        duration_s = self._random.choice([0.3, 1.6, 2.2, 4.0]) * self._random.uniform(0.8, 1.2)
        self._note(f"{host.name} stands still for {duration_s:.3f} s")
        host.free_s = max(host.free_s, self._mesh.loop.now_s + duration_s)

    def hang_between_awaits(self) -> None:
        host = self._victim()
        self._trap(host, lambda: self.hang(host))

    def slow(self) -> None:
        host = self._victim()
        self._note(f"{host.name} is slow")
        host.turn_s = self._random.choice([5e-4, 5e-3, 2e-2])
        self._later(setattr, host, "turn_s", TURN_S)

    def slow_threads(self) -> None:
        host = self._victim()
        self._note(f"the threads of {host.name} are slow")
        host.thread_s = THREAD_S * self._random.choice([10, 100])
        self._later(setattr, host, "thread_s", THREAD_S)

    def hang_step(self) -> None:
        if workers := self._mesh.live("worker"):
            host = self._random.choice(workers)
            self._note(f"a step of {host.name} hangs", is_loss=True)
            host.may_break, host.thread_s = True, 1e3

    def fail_step(self) -> None:
        for host in self._mesh.live("worker")[:1]:
            if host.engine is not None:
                self._note(f"a step of {host.name} fails", is_loss=True)
                host.may_break = host.engine.fails_next = True

    def stop(self) -> None:
        host = self._victim()
        if not host.is_stopping:
            self._note(f"{host.name} is told to stop", is_loss=True)
            host.is_stopping = True
            host.stop_soon()

    def change_minor(self) -> None:
        """Its next process speaks another minor version."""
        host = self._victim()
        host.site.minor = self._random.choice(OLD_MINORS)
        self.stop() if self._random.random() < 0.5 else self.kill(host)

    def jump(self) -> None:
        host = self._victim()
        self._note(f"the wall clock of {host.name} jumps")
        host.wall_s += self._random.choice([-3600.0, -1.0, 1.0, 3600.0])

    # --- connections ----------------------------------------------------------------------------

    def _connection(self) -> Connection | None:
        found = self._mesh.network.between(self._victim())
        return self._random.choice(found) if found else None

    def cut(self) -> None:
        if (connection := self._connection()) is not None:
            self._note(f"cut {connection}", is_loss=True)
            connection.cut(self._random.random() < 0.4, self._random.random() < 0.7)

    def delay(self) -> None:
        if (connection := self._connection()) is not None:
            self._note(f"{connection} is slow")
            connection.latency_s = self._random.choice([5e-3, 5e-2, 0.5])
            self._later(setattr, connection, "latency_s", LATENCY_S)

    def bad_frame(self) -> None:
        if (connection := self._connection()) is not None:
            self._note(f"a bad frame on {connection}", is_loss=True)
            connection.spoils_next = True

    def _later(self, call: Callable[..., None], *arguments: object) -> None:
        self._mesh.later(self._random.uniform(0.1, 3), call, *arguments)
