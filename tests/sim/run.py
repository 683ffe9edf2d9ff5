"""Runs of the simulator by seed: ``python -m tests.sim.run SEED [SEED …]``."""

import sys
from functools import cache
from random import Random

from tests.sim.clients import NUM_JOBS, Request
from tests.sim.faults import Faults
from tests.sim.mesh import Mesh, Shape
from tests.sim.oracle import check_request, left_in

BUSY_S = 5.0
START_S, END_S, REST_S = 3.0, 90.0, 15.0
LOOK_S = 0.05


class Run:
    """One mesh, from its start to its rest. ``mesh.network.log`` is filled if it ``is_logged``."""

    def __init__(self, seed: int, is_logged: bool = False) -> None:
        self.seed = seed
        random = Random(seed)
        self.mesh = Mesh(seed, Shape(random), is_logged)
        self.random = self.mesh.random
        self.faults = Faults(self.mesh)

    def run(self) -> None:
        """Raises AssertionError, with the way to see it again in its notes."""
        mesh = self.mesh
        try:
            with mesh.running():
                for site in mesh.sites:
                    mesh.later(self.random.uniform(0, 0.5), mesh.start, site)
                mesh.look_often(LOOK_S)
                self._plan()
                mesh.run(lambda: False, BUSY_S)
                assert mesh.run(self._is_over, END_S), f"it does not end: {self._open()}"
                assert mesh.run(lambda: not left_in(mesh), REST_S), f"left: {left_in(mesh)}"
                self._check()
        except Exception as error:
            error.add_note(f"python -m tests.sim.run {self.seed}")
            raise

    def _plan(self) -> None:
        for number in range(self.random.randint(3, 14)):
            self.mesh.later(self.random.uniform(0.5, BUSY_S), self._ask, number)
        for _ in range(self.random.choice([0, 1, 2, 4, 8, 16])):
            self.mesh.later(self.random.uniform(0.2, BUSY_S), self.faults.befall)

    def _ask(self, number: int) -> None:
        gateways = [each for each in self.mesh.live("gateway") if each.service is not None]
        if not gateways:
            return
        now_s = self.mesh.loop.now_s
        request = Request(f"r{number}~{number}", self.random.randrange(NUM_JOBS), now_s)
        request.read_s = self.random.choice([0.0, 0.0, 0.0, 0.02, 1.0])
        request.is_traced = self.random.random() < 0.3
        if self.random.random() < 0.15:
            request.leaves_s = self.random.expovariate(5)
        elif self.random.random() < 0.1:
            request.aborts_s = self.random.expovariate(5)
        self.mesh.ask(self.random.choice(gateways), request)

    def _open(self) -> list[str]:
        return [each.name for each in self.mesh.requests if each.is_open]

    def _is_over(self) -> bool:
        mesh = self.mesh
        is_whole = len(mesh.live()) == len(mesh.sites)
        return is_whole and not any(each.is_open for each in mesh.requests)

    def _check(self) -> None:
        mesh = self.mesh
        assert not mesh.broken, f"services broke: {mesh.broken}"
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
        mesh.run(lambda: False, START_S)
        (gateway,) = mesh.live("gateway")
        for number in range(NUM_JOBS):
            request = Request(f"job{number}~{number}", number, mesh.loop.now_s)
            mesh.ask(gateway, request)
            assert mesh.run(lambda: not mesh.requests[-1].is_open, END_S), f"job {number} lasts"
            assert request.choices, f"job {number}: {request.error or request.fault!r}"
    return mesh.requests


def main(seeds: list[int]) -> None:
    for seed in seeds:
        run = Run(seed, is_logged=True)
        try:
            run.run()
        finally:
            print("\n".join(run.mesh.network.log))


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]])
