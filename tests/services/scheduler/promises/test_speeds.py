"""Workers of different speeds share sequences and prompts by their measured times."""

from heapq import heappop, heappush

import msgspec
import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.worker_state import PROBATION_STEPS
from shared.wire.messages import SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker
from tests.services.scheduler.step_bench import CAPACITY, on_a_cpu

FAST, SLOW = "fast", "slow"


class Pair:
    """Two workers on a simulated clock, one of which takes ``factor`` times as long for each
    step."""

    def __init__(self, factor: float) -> None:
        self.core = Scheduler(1000, 10, pipeline_depth=1, stream_rate=0.5)
        self.now_s = 0.0
        self._factors = {FAST: 1.0, SLOW: factor}
        self._workers = {name: SimulatedWorker(CAPACITY) for name in self._factors}
        self._due: list[tuple[float, str, Planned]] = []
        self._num_added = 0
        for name in self._factors:
            self.core.add_worker(name, CAPACITY, PROBATION_STEPS)
        for name in self._factors:  # each is measured
            self._accept_on(name)
            for _ in range(4):
                self.add(num_prompt=600, max_tokens=8)
            self.finish()
        self._accept_on(*self._factors)
        self.now_s = 0.0

    def _accept_on(self, *names: str) -> None:
        for name, worker in self.core.workers.items():
            worker.admits = name in names

    def add(self, num_prompt: int = 20, max_tokens: int = 50, start: int = 0) -> None:
        self._num_added += 1
        first = start or 100_000 * self._num_added
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        name = f"r{self._num_added}"
        add_one(self.core, name, range(first, first + num_prompt), params, self.now_s)
        sequence = self.core.sequences[name, 1]
        sequence.max_emitted = sequence.max_bytes = 1 << 40

    def plan(self) -> None:
        busy = {name for _, name, _ in self._due}
        for name in sorted(self._factors.keys() - busy):
            if planned := self.core.plan(name):
                heappush(self._due, (self.now_s + self._seconds(name, planned), name, planned))

    def step(self) -> None:
        self.plan()
        self.now_s, name, planned = heappop(self._due)
        result, arrays = self._workers[name].step(planned)
        result = msgspec.structs.replace(result, step_s=self._seconds(name, planned))
        self.core.absorb(name, result, arrays)
        self.core.take_ended()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def _seconds(self, name: str, planned: Planned) -> float:
        num_prompt = sum(row.num_tokens for row in planned.plan.prefill)
        step_s = on_a_cpu(num_prompt, len(planned.plan.decode))
        return self._factors[name] * step_s * planned.plan.num_steps

    def finish(self) -> None:
        while self.core.sequences:
            self.step()

    def num_running(self, name: str) -> int:
        return len(self.core.workers[name].running)


@pytest.mark.parametrize(("factor", "least", "most"), [(1.0, 20, 20), (1.3, 20, 20), (4.0, 30, 34)])
def test_sequences_are_shared_by_the_speed_of_workers(factor: float, least: int, most: int) -> None:
    pair = Pair(factor)
    for _ in range(40):
        pair.add()
    pair.plan()
    pair.run(num_steps=4)
    assert pair.num_running(FAST) + pair.num_running(SLOW) == 40
    assert least <= pair.num_running(FAST) <= most


def test_a_slow_worker_gets_none_while_a_fast_one_would_be_done_earlier() -> None:
    pair = Pair(6.0)
    for number in range(4):
        pair.add(max_tokens=4000)
        pair.run(num_steps=20)  # it joins streams in its turn
        assert pair.num_running(FAST) == number + 1
        assert pair.num_running(SLOW) == 0


def test_all_sequences_end_earlier_than_with_equal_shares() -> None:
    pair = Pair(4.0)
    for _ in range(40):
        pair.add(max_tokens=400)
    pair.finish()
    equal_s = 4 * on_a_cpu(0, 20) * 400
    assert pair.now_s < 0.7 * equal_s


@pytest.mark.parametrize(("num_cached", "holder_is_chosen"), [(480, True), (320, False)])
def test_a_cached_prefix_counts_as_the_time_that_it_saves(
    num_cached: int, holder_is_chosen: bool
) -> None:
    pair = Pair(3.0)
    pair.core.workers[FAST].admits = False
    pair.add(num_prompt=num_cached + 1, max_tokens=1, start=50_000_000)
    pair.finish()
    pair.core.workers[FAST].admits = True
    pair.add(num_prompt=640, start=50_000_000)
    pair.plan()
    assert pair.num_running(SLOW) == holder_is_chosen
    assert pair.num_running(FAST) == (not holder_is_chosen)
