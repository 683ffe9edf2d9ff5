"""Runs of the simulator by seed: ``python -m tests.sim.run SEED`` or ``FIRST..LAST``."""

import gc
import sys
from collections.abc import Iterable
from functools import cache
from multiprocessing import get_context
from random import Random
from unittest.mock import patch

from shared.wire.messages import LoadAdapter, Message, UnloadAdapter
from tests.sim.adapters import LOADED, served_at
from tests.sim.clients import NUM_JOBS, Request, job_of
from tests.sim.faults import Faults
from tests.sim.mesh import Mesh, Shape
from tests.sim.moves import check_moves
from tests.sim.oracle import check_progress, check_request, left_in
from tests.sim.stores import check_stores

BUSY_S = 3.0
SOON_S = 0.1
START_S, END_S, REST_S = 3.0, 90.0, 15.0
PLAIN = [number for number in range(NUM_JOBS) if not job_of(number).options.adapter]


class Run:
    """One mesh, from its start to its rest. ``mesh.network.log`` is filled if it ``is_logged``."""

    def __init__(self, seed: int, is_logged: bool = False) -> None:
        self.seed = seed
        random = Random(seed)
        self.mesh = Mesh(seed, Shape(random), is_logged)
        self.random = self.mesh.random
        self.faults = Faults(self.mesh)
        self.prefers_adapters = self.random.choice([False, True])

    def run(self) -> None:
        """Raises AssertionError, with the way to see it again in its notes."""
        mesh = self.mesh
        try:
            with (
                mesh.running(),
                patch("shared.wire.kv_groups.READ_AT_ONCE", 16),
                patch("shared.wire.kv_groups.COPY_INTERVAL", 16),
            ):
                for site in mesh.sites:
                    mesh.later(self.random.uniform(0, 0.5), mesh.start, site)
                self._plan()
                mesh.on_look = lambda: check_progress(mesh)
                mesh.run(BUSY_S)
                assert mesh.run(END_S, self._is_over), f"it does not end: {self._open()}"
                assert mesh.run(REST_S, lambda: not left_in(mesh)), f"left: {left_in(mesh)}"
                self._check()
        except Exception as error:
            error.add_note(f"replay: python -m tests.sim.run {self.seed}")
            raise

    def _plan(self) -> None:
        """Requests come in a short time or a longer one, and series of faults soon after some."""
        draw, later = self.random.uniform, self.mesh.later
        until_s = draw(0.8, BUSY_S)
        begun_s = [draw(0.7, until_s) for _ in range(self.random.randint(3, 14))]
        for number, at_s in enumerate(begun_s):
            later(at_s, self._ask, number)
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 4, 4])):
            at_s = self.random.choice(begun_s) + self.random.expovariate(1 / SOON_S)
            later(at_s, self.faults.befall, self.random.choice([1, 2, 3, 5]))
        for number in range(self.random.choice([0, 1, 1, 2, 4])):
            at_s = draw(0.6, until_s if number else 1.0)
            name, path = LOADED.name, LOADED.path
            load = LoadAdapter(f"l{number}", name, path)
            is_load = number == 0 or self.random.random() < 0.5
            later(at_s, self._order, load if is_load else UnloadAdapter(name, f"u{number}"))

    def _ask(self, number: int) -> None:
        gateways = [each for each in self.mesh.live("gateway") if each.service is not None]
        if not gateways:
            return
        now_s = self.mesh.loop.now_s
        gateway = self.random.choice(gateways)
        job_number = self._job_number(served_at(gateway.service))
        request = Request(f"r{number}~{number}", job_number, now_s)
        request.read_s = self.random.choice([0.0, 0.0, 0.0, 0.02, 1.0])
        request.is_traced = self.random.random() < 0.3
        if self.random.random() < 0.15:
            request.leaves_s = self.random.expovariate(5)
        elif self.random.random() < 0.1:
            request.aborts_s = self.random.expovariate(5)
        self.mesh.ask(gateway, request)

    def _job_number(self, served: set[str]) -> int:
        """Some runs prefer requests for adapters. The name of one that is not served is unknown."""
        adapted = [each for each in range(NUM_JOBS) if job_of(each).options.adapter in served]
        if adapted and self.prefers_adapters:
            return self.random.choice(adapted)
        return self.random.choice([*PLAIN, *adapted])

    def _order(self, message: Message) -> None:
        """A client loads or unloads an adapter."""
        gateways = [each for each in self.mesh.live("gateway") if each.service is not None]
        if gateways:
            self.mesh.order(self.random.choice(gateways), message)

    def _open(self) -> list[str]:
        return [each.name for each in self.mesh.requests if each.is_open]

    def _is_over(self) -> bool:
        mesh = self.mesh
        is_whole = len(mesh.live()) == len(mesh.sites)
        return is_whole and not any(each.is_open for each in mesh.requests)

    def _check(self) -> None:
        mesh = self.mesh
        assert not mesh.broken, f"services broke: {mesh.broken}"
        for host in mesh.live("scheduler"):
            check_stores(host.service, mesh.folders)
            check_moves(host.service)
        for request in mesh.requests:
            if not request.is_lost:
                check_request(request, alone()[request.job_number], self.faults, mesh)


@cache
def alone() -> list[Request]:
    """What becomes of each job in a mesh without faults, one after the other."""
    mesh = Mesh(0, Shape(None))
    with mesh.running():
        for site in mesh.sites:
            mesh.start(site)
        mesh.run(START_S)
        (gateway,) = mesh.live("gateway")
        for number in range(NUM_JOBS):
            request = Request(f"job{number}~{number}", number, mesh.loop.now_s)
            mesh.ask(gateway, request)
            assert mesh.run(END_S, lambda: not mesh.requests[-1].is_open), f"job {number} lasts"
            assert request.choices, f"job {number}: {request.error or request.fault!r}"
    return mesh.requests


def fails(seed: int) -> str:
    """Returns why a run fails; empty: it passes."""
    run = Run(seed)
    gc.disable()  # it would take a third of the time
    try:
        run.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}\nreplay: python -m tests.sim.run {seed}"
    finally:
        gc.enable()
        gc.collect()
    return ""


def search(seeds: Iterable[int], num_processes: int = 2) -> list[str]:
    """Returns why some of ``seeds`` fail."""
    with get_context("forkserver").Pool(num_processes, _freeze) as pool:
        return [each for each in pool.imap(fails, seeds, chunksize=8) if each]


def _freeze() -> None:
    """Garbage collections skip the imported modules."""
    gc.collect()
    gc.freeze()


def main(text: str) -> int:
    """``FIRST..LAST`` searches; one seed is replayed with a log of its messages."""
    first, _, last = text.partition("..")
    if last:
        found = search(range(int(first), int(last) + 1))
        print(*found, f"{len(found)} failed", sep="\n\n")
        return bool(found)
    run = Run(int(first), is_logged=True)
    try:
        run.run()
    finally:
        print(*run.mesh.network.log, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
