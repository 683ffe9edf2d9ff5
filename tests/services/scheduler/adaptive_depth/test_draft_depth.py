"""The best depth is found, kept, and found again, on made-up workers."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import mean

import msgspec
import pytest

from services.scheduler.adaptive_depth.draft_depth import PROBED_EVERY, AdaptiveDepth
from shared.wire.messages import (
    Capacity,
    Decode,
    Prefill,
    ResultRow,
    StepPlan,
    StepResult,
    TokenRun,
)

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=64, max_num_batched_tokens=512,
                    max_model_len=2048, num_speculative_tokens=3, adapts_depth=True)  # fmt: skip
WARM_UP = 200
PREFILL_S = 0.05
GOOD, MEDIUM, USELESS = (0.9, 0.9, 0.9), (0.7, 0.55, 0.5), (0.0, 0.0, 0.0)
SEEDS = range(3)

Rates = tuple[float, ...]
Costs = Callable[[int, int], float]  # seconds of a step, by number of rows and depth


def cpu(num_rows: int, depth: int) -> float:
    """Each step, computed id and drafting pass has a cost."""
    return 0.01 + 0.0005 * num_rows * (1 + depth) + 0.001 * depth


def free(num_rows: int, depth: int) -> float:
    return 0.01


@dataclass
class Worker:
    """Runs plans like a scheduler's, two in flight. ``rates`` are the drafts' acceptance rates;
    times are up to about 20 % too long, and sometimes three times as long; a row sometimes lacks
    its drafts. Functions take the number of the step. Plans have ``num_steps`` while the depth does
    not change."""

    rates: Callable[[int], Rates]
    num_rows: Callable[[int], int] = lambda step: 1
    costs: Costs = cpu
    has_prefill: Callable[[int], bool] = lambda step: False
    slowness: Callable[[int], float] = lambda step: 1.0
    lacking: float = 0.0
    idle_s: float = 0.001
    capacity: Capacity = CAPACITY
    seed: int = 0
    num_steps: int = 1

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.draft_depth = AdaptiveDepth(self.capacity)
        self.plans: deque[StepPlan] = deque()
        self.depths: list[int] = []  # verified depths, by the number of the step
        self._next_depth = 0

    def run(self, num_steps: int) -> "Worker":
        end = len(self.depths) + num_steps
        while len(self.depths) < end:
            while len(self.plans) < 2:
                self._plan()
            plan = self.plans.popleft()
            self.draft_depth.note(plan, self._step(plan))
        return self

    def throughput(self, start: int, end: int) -> float:
        """The throughput of these steps' depths relative to the best one's."""
        fixed = [
            [depth] * (end - start) for depth in range(self.capacity.num_speculative_tokens + 1)
        ]
        best = max(self._rate(start, depths) for depths in fixed)
        return self._rate(start, self.depths[start:end]) / best

    def share(self, depth: int, start: int, end: int) -> float:
        return self.depths[start:end].count(depth) / (end - start)

    def _plan(self) -> None:
        step = len(self.depths) + sum(plan.num_steps for plan in self.plans)
        prefill = [Prefill(self.capacity.max_num_seqs, 100)] if self.has_prefill(step) else []
        decode = [Decode(slot, self._next_depth) for slot in range(self.num_rows(step))]
        depth, self._next_depth = self._next_depth, self.draft_depth.now
        is_steady = depth == self._next_depth and not prefill
        num = min(self.num_steps, self.draft_depth.max_num_steps) if is_steady else 1
        self.plans.append(StepPlan(step, [], [], [], prefill, decode, self._next_depth, num))

    def _step(self, plan: StepPlan) -> StepResult:
        depth, time_s = plan.decode[0].verify_depth, PREFILL_S * len(plan.prefill)
        rows = []
        for step in range(plan.step, plan.step + plan.num_steps):
            self.depths.append(depth)
            time_s += self._time_s(step, len(plan.decode), depth)
            rows += [self._row(row, self.rates(step)) for row in plan.decode]
        return StepResult(plan.step, rows, time_s, self.idle_s, [], plan.num_steps)

    def _time_s(self, step: int, num_rows: int, depth: int) -> float:
        time_s = self.costs(num_rows, depth) * self.slowness(step)
        time_s *= 1 + abs(self.random.gauss(0, 0.1))
        return time_s * self.random.choice([1] * 30 + [3])

    def _row(self, row: Decode, rates: Rates) -> ResultRow:
        num_drafts = 0 if self.random.random() < self.lacking else row.verify_depth
        wrong = (i for i in range(num_drafts) if self.random.random() >= rates[i])
        num_accepted = next(wrong, num_drafts)
        return ResultRow(
            row.slot,
            "r",
            1,
            TokenRun(num_accepted + 1, num_drafts=num_drafts, num_accepted=num_accepted),
        )

    def _rate(self, start: int, depths: list[int]) -> float:
        """Expected tokens per second of steps at these depths."""
        num_tokens = time_s = 0.0
        for step, depth in enumerate(depths, start):
            num_rows, reached = self.num_rows(step), 1 - self.lacking
            num_tokens += num_rows
            for rate in self.rates(step)[:depth]:
                reached *= rate
                num_tokens += num_rows * reached
            time_s += self.costs(num_rows, depth) + self.idle_s
        return num_tokens / time_s


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("rates", [GOOD, MEDIUM, (0.4, 0.3, 0.3), (0.2, 0.1, 0.1), USELESS])
def test_throughput_is_within_5_percent_of_the_best_depth(rates: Rates, num_rows: int, seed: int):
    worker = Worker(lambda step: rates, lambda step: num_rows, seed=seed).run(2000)
    assert worker.throughput(0, WARM_UP) > 0.85
    assert worker.throughput(WARM_UP, 2000) > 0.95


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rates", [GOOD, MEDIUM, (0.2, 0.1, 0.1), USELESS])
def test_it_is_found_by_plans_of_several_steps_too(rates: Rates, seed: int):
    worker = Worker(lambda step: rates, seed=seed, num_steps=8).run(2000)
    assert worker.throughput(0, WARM_UP) > 0.85
    assert worker.throughput(WARM_UP, 2000) > 0.95
    assert set(worker.depths[:WARM_UP]) == {0, 1, 2, 3}
    starts = range(WARM_UP, 2000 - 2 * PROBED_EVERY, PROBED_EVERY)
    assert all(len(set(worker.depths[each : each + 2 * PROBED_EVERY])) > 1 for each in starts)


@pytest.mark.parametrize("seed", SEEDS)
def test_good_drafts_that_cost_nothing_are_made_as_deep_as_may_be(seed: int):
    worker = Worker(lambda step: GOOD, costs=free, seed=seed).run(2000)
    assert worker.share(3, WARM_UP, 2000) > 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_useless_drafts_are_made_in_at_most_2_percent_of_the_steps_but_not_in_none(seed: int):
    worker = Worker(lambda step: USELESS, seed=seed).run(5000)
    assert 0.01 < 1 - worker.share(0, WARM_UP, 5000) <= 0.02


@pytest.mark.parametrize("seed", SEEDS)
def test_other_depths_are_probed_in_at_most_2_percent_of_the_steps(seed: int):
    worker = Worker(lambda step: GOOD, seed=seed).run(5000)
    assert 0.01 < 1 - worker.share(3, WARM_UP, 5000) <= 0.02
    assert set(worker.depths[WARM_UP:]) == {0, 2, 3}


@pytest.mark.parametrize("seed", SEEDS)
def test_each_size_of_batch_has_its_own_depth_which_it_keeps(seed: int):
    num_rows = (1, 32, 8, 1, 32, 32)

    def costs(num_rows: int, depth: int) -> float:
        return cpu(num_rows, depth) if num_rows < 32 else 0.02 * (1 + 2 * depth)

    worker = Worker(lambda step: GOOD, lambda step: num_rows[step // 500], costs, seed=seed)
    worker.run(2500)
    for start in range(0, 2500, 500):
        assert worker.throughput(start + 100, start + 500) > 0.95
    assert worker.share(3, 1510, 2000) > 0.97, "known from before"
    assert worker.share(0, 2010, 2500) > 0.97


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rates", [(USELESS, GOOD), (GOOD, USELESS)])
def test_a_change_of_acceptance_is_noticed_in_both_directions(
    rates: tuple[Rates, Rates], seed: int
):
    worker = Worker(lambda step: rates[step >= 2000], seed=seed).run(4500)
    assert worker.throughput(WARM_UP, 2000) > 0.95
    assert worker.throughput(3000, 4500) > 0.95


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("slowness", [(1, 2), (2, 1), (1, 2) * 14])
def test_a_machine_that_is_slow_for_a_while_changes_nothing(slowness: tuple[int, ...], seed: int):
    length = 4200 // len(slowness)
    worker = Worker(lambda step: GOOD, slowness=lambda step: slowness[step // length], seed=seed)
    assert worker.run(4198).share(3, WARM_UP, 4198) > 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_that_compute_prompts_tell_nothing_of_the_time(seed: int):
    """Steps without prompts are few here, at most a third."""
    worker = Worker(lambda step: MEDIUM, lambda step: 8, seed=seed)
    worker.has_prefill = lambda step: step % 3 > 0
    assert worker.run(3000).throughput(1000, 3000) > 0.95


def test_without_a_step_that_computes_no_prompt_useless_drafts_end_too():
    worker = Worker(lambda step: USELESS, has_prefill=lambda step: True).run(10_000)
    assert worker.share(0, 1000, 10_000) > 0.97


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_that_are_not_there_bring_nothing(seed: int):
    worker = Worker(lambda step: GOOD, lambda step: 32, lacking=0.7, seed=seed).run(2000)
    assert worker.throughput(WARM_UP, 2000) > 0.95
    assert worker.share(0, WARM_UP, 2000) > 0.9


def test_depths_that_pay_the_same_do_not_take_turns():
    def costs(num_rows: int, depth: int) -> float:
        return 0.01 * (1, 1.5, 1.75, 1.875)[depth] - 0.001

    rates, num_steps = (0.5, 0.5, 0.5), 5000
    num_changes = []
    for seed in range(6):
        worker = Worker(lambda step: rates, lambda step: 8, costs, seed=seed).run(num_steps)
        num_changes.append(sum(a != b for a, b in pairwise(worker.depths[WARM_UP:])))
    for_probes = 2 * (num_steps - WARM_UP) / PROBED_EVERY
    assert mean(num_changes) < for_probes + 8


@pytest.mark.parametrize("seed", SEEDS)
def test_of_many_depths_a_good_one_is_found(seed: int):
    deep = msgspec.structs.replace(CAPACITY, num_speculative_tokens=10)
    worker = Worker(lambda step: (0.8,) * 10, capacity=deep, seed=seed).run(3000)
    assert worker.throughput(WARM_UP, 3000) > 0.95


def test_no_more_drafts_are_asked_for_than_a_step_has_room_for():
    small = msgspec.structs.replace(CAPACITY, max_num_batched_tokens=24)
    worker = Worker(lambda step: GOOD, lambda step: 8, costs=free, capacity=small).run(500)
    assert max(worker.depths[WARM_UP:]) == 1


@pytest.mark.parametrize("depth", [0, 2])
def test_a_pinned_depth_never_changes(depth: int):
    pinned = msgspec.structs.replace(CAPACITY, num_speculative_tokens=depth, adapts_depth=False)
    worker = Worker(lambda step: USELESS, lambda step: 32, capacity=pinned).run(500)
    assert set(worker.depths[1:]) == {depth}


def test_a_worker_that_tells_no_times_is_no_problem():
    worker = Worker(lambda step: USELESS, costs=lambda num_rows, depth: 0, idle_s=0).run(500)
    assert set(worker.depths) <= {0, 1, 2, 3}


def test_equal_results_give_equal_depths():
    depths = [Worker(lambda step: MEDIUM, seed=7).run(1000).depths for _ in range(2)]
    assert depths[0] == depths[1]
