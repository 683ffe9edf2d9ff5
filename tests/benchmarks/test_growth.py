"""Cells in virtual time, small: what goes in comes out once, in order, the same each time."""

from itertools import count
from typing import Any

import pytest

from benchmarks.harness.cells import Job
from benchmarks.harness.simulated_mesh import Mesh, Shape

TICK_S = 50e-6


def ticking() -> Any:
    """A clock that every look at takes on by as much."""
    ticks = count()
    return lambda: TICK_S * next(ticks)


def run(shape: Shape, num_jobs: int, priorities: int = 1) -> Mesh:
    """All jobs come within three steps, and the mesh runs until none is left."""
    numbers = count()

    def make_job() -> Job:
        number = next(numbers)
        return Job(40 + number % 7, 1 + number % 9, priority=number % priorities)

    mesh = Mesh(shape, ticking(), make_job)
    for number in range(num_jobs):
        mesh.arrive_at(3 * shape.step_s * number / num_jobs)
    mesh.run_until(float("inf"))
    return mesh


@pytest.mark.parametrize("num_cells", [1, 3])
def test_every_sequence_ends_once_with_all_its_tokens_on_one_worker(num_cells: int) -> None:
    mesh = run(Shape(9, 4, num_cells), 200)
    assert len(mesh.outcomes) == 200
    for outcome in mesh.outcomes:
        assert outcome.num_ends == 1
        assert outcome.num_tokens == outcome.job.max_tokens
        assert len(outcome.workers) == 1
        assert outcome.first_s is not None
        assert outcome.first_s > outcome.arrived_s
    for cell in mesh.cells:
        assert not cell.core.sequences
        assert {name for each in cell.outcomes.values() for name in each.workers} == {*cell.workers}


def test_cells_have_disjoint_workers_and_share_what_comes_evenly() -> None:
    mesh = run(Shape(9, 4, num_cells=3), 99)
    names = [name for cell in mesh.cells for name in cell.workers]
    assert len(names) == len(set(names)) == 9
    assert [len(cell.outcomes) for cell in mesh.cells] == [33, 33, 33]


def test_who_has_priority_is_admitted_first() -> None:
    (cell,) = run(Shape(1, 2), 60, priorities=3).cells
    admitted = list(dict.fromkeys(cell.admitted))  # again where one gave way
    assert len(admitted) == 60

    def order(name: str) -> tuple[int, float]:
        outcome = cell.outcomes[name]
        return outcome.job.priority, outcome.arrived_s

    late = [name for name in admitted if cell.outcomes[name].first_s > 10 * 0.025]
    assert len(late) > 40
    assert late == sorted(late, key=order)


def test_the_same_clock_gives_the_same_figures() -> None:
    def times() -> list[float | None]:
        return [each.first_s for each in run(Shape(4, 4), 60).outcomes]

    assert times() == times()


def test_what_the_scheduler_computes_is_time_that_first_tokens_take() -> None:
    def last_s(tick_s: float) -> float:
        ticks = count()
        mesh = Mesh(Shape(4, 4), lambda: tick_s * next(ticks), lambda: Job(40, 2))
        for _ in range(16):
            mesh.arrive()
        mesh.run_until(float("inf"))
        return max(each.first_s or 0.0 for each in mesh.outcomes)

    step_s = 1.05 * 0.025 + 4 * 40 * 20e-6
    assert last_s(0.0) <= step_s
    assert last_s(0.01) > 16 * 0.01, "each arrival alone takes a tick"
