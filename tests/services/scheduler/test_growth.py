"""The cost of a step, in function calls, does not grow with the number of workers, running or
waiting sequences."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.placement import MIN_COMPARED
from services.scheduler.prefills import PrefillLimits
from services.scheduler.queues import NUM_LOOKED_AT
from services.scheduler.scheduler import Scheduler
from services.scheduler.worker_state import PROBATION_STEPS
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=4000, block_size=16, max_num_seqs=4, max_num_batched_tokens=64,
                    max_model_len=32_000)  # fmt: skip
SHORT, LONG = 8, 100


def num_calls(work: Callable[[], Any]) -> int:
    """The number of Python function entries and generator resumptions, those of finalizers left
    out."""
    events: list[str] = []
    gc.collect()
    gc.disable()
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return events.count("call")


class Full:
    """``num_workers`` past their first steps with the most running sequences and plans in flight;
    ``num_waiting`` sequences wait."""

    def __init__(self, num_workers: int = 2, num_waiting: int = 20, waiting_len: int = SHORT):
        limits = PrefillLimits(max_partial=CAPACITY.max_num_seqs)
        self.core = Scheduler(1 << 20, 10, False, 2, limits)
        self.workers: dict[str, SimulatedWorker] = {}
        self.results: dict[str, list[Any]] = {}
        self.num_added = 0
        for number in range(num_workers):
            self.join(f"w{number}")
        for _ in range(num_workers * CAPACITY.max_num_seqs):
            self.add(SHORT)
        for _ in range(PROBATION_STEPS + 1):
            self.plan()
            for name in self.workers:
                self.finish(name)
        for _ in range(num_waiting):
            self.add(waiting_len)
        self.plan()

    def join(self, name: str) -> None:
        self.workers[name], self.results[name] = SimulatedWorker(CAPACITY), []
        self.core.add_worker(name, CAPACITY)

    def add(self, prompt_len: int, max_tokens: int = 200) -> str:
        self.num_added += 1
        name = f"r{self.num_added}"
        add_one(self.core, name, [1] * prompt_len, SamplingParams(seed=0, max_tokens=max_tokens))
        return name

    def plan(self) -> None:
        """Like the service after every change."""
        for name in self.core.workers_in_need:
            while (planned := self.core.plan(name)) is not None:
                self.results[name].append(self.workers[name].step(planned))

    def finish(self, name: str) -> None:
        """Its oldest plan has run."""
        self.core.absorb(name, *self.results[name].pop(0))

    def end_one(self, name: str) -> None:
        """Ends a sequence of the worker."""
        self.core.cancel(next(iter(self.core.workers[name].running.values())).key)


def test_after_a_result_only_the_worker_that_it_came_from_is_in_need_of_a_plan() -> None:
    full = Full(num_workers=5)
    assert full.core.workers_in_need == []
    full.finish("w3")
    assert full.core.may_change_other_plans
    assert full.core.workers_in_need == ["w3"]
    full.plan()
    assert full.core.workers_in_need == []


@pytest.mark.parametrize("event", ["result", "arrival", "cancel"])
def test_the_cost_of_an_event_does_not_grow_with_workers(event: str) -> None:
    def cost(num_workers: int) -> int:
        full = Full(num_workers)

        def happen() -> None:
            if event == "result":
                full.finish("w0")
            elif event == "arrival":
                full.add(SHORT)
            else:
                full.core.cancel((f"r{full.num_added}", 1))
            assert full.core.may_change_other_plans
            full.plan()

        return num_calls(happen)

    assert cost(32) == cost(2)


def test_to_place_a_sequence_costs_no_more_where_other_workers_run_more() -> None:
    def cost(num_running: int) -> int:
        core = Scheduler(100, 10, False)
        core.add_worker("idle", CAPACITY)
        core.add_worker("busy", CAPACITY)
        core.workers["idle"].admits = False
        for number in range(num_running):
            add_one(core, f"r{number}", [1] * SHORT, SamplingParams(seed=0))
        core.plan("busy")
        assert len(core.workers["busy"].running) == num_running
        core.workers["idle"].admits = True
        add_one(core, "new", [1] * SHORT, SamplingParams(seed=0))
        return num_calls(lambda: core.plan("idle"))

    assert cost(3) == cost(1)


def test_a_plan_looks_at_so_many_that_wait_and_no_more() -> None:
    def cost(num_waiting: int) -> int:
        full = Full(1, num_waiting, LONG)
        full.end_one("w0")
        full.finish("w0")
        full.plan()  # a long prompt takes the slot
        full.end_one("w0")
        full.finish("w0")
        return num_calls(full.plan)

    few, many = cost(4 * NUM_LOOKED_AT), cost(16 * NUM_LOOKED_AT)
    assert many <= few + 10, "two more, for a queue is searched by halves"


def test_a_worker_that_has_to_prove_itself_looks_at_none_that_wait() -> None:
    def cost(num_waiting: int) -> int:
        full = Full(1, num_waiting)
        full.join("new")
        full.plan()
        assert len(full.core.workers["new"].running) == 1
        full.finish("new")
        return num_calls(full.plan)

    assert cost(640) <= cost(10) + 10


def test_a_short_prompt_overtakes_long_ones_however_many_there_are() -> None:
    full = Full(1, 4 * NUM_LOOKED_AT, 30 * LONG)
    name = full.add(SHORT)
    full.end_one("w0")
    full.end_one("w0")
    for _ in range(8):
        full.plan()
        full.finish("w0")
    assert any(each.request == name for each in full.core.workers["w0"].running.values())


def idle(num_workers: int) -> Scheduler:
    core = Scheduler(100, 10)
    for number in range(num_workers):
        core.add_worker(f"w{number}", CAPACITY)
    return core


def test_to_place_a_sequence_costs_no_more_where_there_are_more_workers() -> None:
    def cost(num_workers: int) -> int:
        core = idle(num_workers)
        add_one(core, "r", [1] * SHORT, SamplingParams(seed=0))
        return num_calls(lambda: core.plan("w0"))

    assert cost(1 + 8 * MIN_COMPARED) == cost(1 + 2 * MIN_COMPARED)


def test_many_sequences_are_shared_out_evenly_among_many_workers() -> None:
    core = idle(3 * MIN_COMPARED)
    for number in range(2 * len(core.workers)):
        add_one(core, f"r{number}", [number] * SHORT, SamplingParams(seed=0))
    for name in core.workers:
        core.plan(name)
    assert {len(each.running) for each in core.workers.values()} == {2}


def test_a_sequence_goes_to_the_one_of_many_workers_that_has_its_prefix() -> None:
    core, name = idle(3 * MIN_COMPARED), f"w{2 * MIN_COMPARED}"
    prefix = list(range(CAPACITY.max_num_batched_tokens))
    add_one(core, "first", prefix, SamplingParams(seed=0, max_tokens=1))
    core.absorb(name, *SimulatedWorker(CAPACITY).step(core.plan(name)))
    add_one(core, "second", [*prefix, 1], SamplingParams(seed=0))
    others = [each for each in core.workers if each != name]
    assert not any(core.plan(each) for each in others)
    core.remove_worker(name, 0)
    assert core.plan(others[0]).plan.admit[0].request == "second"
