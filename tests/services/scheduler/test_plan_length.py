"""The number of steps of a plan, and the results of a plan of several steps."""

from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.results import check_result
from services.scheduler.scheduler import Scheduler
from services.scheduler.worker_state import PROBATION_STEPS
from shared.errors import CodecError
from shared.wire.messages import (
    Capacity,
    Grant,
    ResultRow,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.schedules import expected_text
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=32,
                    max_model_len=128, vocab_size=1001, max_num_steps=8)  # fmt: skip
FAST_STEPS = 3  # of a fast worker: this many take PLAN_S


class Cell:
    """One worker past probation, with one plan in flight or more."""

    def __init__(self, depth: int = 1, is_fast: bool = True, stop: int = 0, **capacity: Any):
        self.capacity = msgspec.structs.replace(CAPACITY, **capacity)
        self.core = Scheduler(max_waiting=10, priority_step_s=10, pipeline_depth=depth)
        self.core.add_worker("w", self.capacity, PROBATION_STEPS)
        self.worker = SimulatedWorker(self.capacity, stop, is_fast=is_fast)
        self.results: list[tuple[StepResult, TokenArrays]] = []
        self.texts: dict[str, list[int]] = {}

    def add(self, name: str, num_prompt: int = 3, **params: Any) -> None:
        asked = SamplingParams(**({"seed": 0, "max_tokens": None} | params))
        add_one(self.core, name, range(num_prompt), asked)
        self.core.grant(Grant(name, 1, 10_000, 1 << 40))

    def plan(self) -> StepPlan:
        planned = self.core.plan("w")
        assert planned is not None
        self.results.append(self.worker.step(planned))
        return planned.plan

    def absorb(self) -> StepResult:
        result, arrays = self.results.pop(0)
        check_result(self.core.workers["w"], result, arrays)
        ids = arrays.ids.tolist()
        for emission in self.core.absorb("w", result, arrays):
            start = sum(row.run.num_tokens for row in result.rows[: emission.index])
            text = self.texts.setdefault(emission.sequence.request, [])
            assert emission.position == len(text)
            text += ids[start : start + emission.row.run.num_tokens]
        return result

    def step(self) -> StepPlan:
        plan = self.plan()
        self.absorb()
        return plan


def decoding(num_steps_before: int = 1, **options: Any) -> Cell:
    """A cell with one sequence past its prompt."""
    cell = Cell(**options)
    cell.add("a")
    for _ in range(num_steps_before):
        cell.step()
    return cell


def test_a_plan_has_as_many_steps_as_take_a_few_milliseconds() -> None:
    cell = decoding()
    assert [cell.step().num_steps for _ in range(3)] == [FAST_STEPS] * 3
    assert len(cell.texts["a"]) == 1 + 3 * FAST_STEPS
    cell.worker.is_fast = False
    cell.step()
    assert cell.step().num_steps == 1, "the last plan says how long a step takes"


def test_steps_that_are_not_short_come_one_by_one() -> None:
    assert decoding(is_fast=False).step().num_steps == 1


@pytest.mark.parametrize("max_num_steps", [1, 2])
def test_no_plan_has_more_steps_than_its_worker_takes(max_num_steps: int) -> None:
    assert decoding(max_num_steps=max_num_steps).step().num_steps == max_num_steps


def test_a_worker_on_probation_gets_single_steps() -> None:
    cell = Cell()
    cell.core.remove_worker("w", 0)
    cell.core.add_worker("w", CAPACITY)
    cell.add("a")
    assert {cell.step().num_steps for _ in range(PROBATION_STEPS)} == {1}
    assert cell.step().num_steps == FAST_STEPS


def test_a_plan_with_a_prompt_or_before_one_that_waits_has_one_step() -> None:
    cell = decoding(max_num_seqs=2)
    cell.add("long", num_prompt=70)
    for _ in range(3):
        plan = cell.step()
        assert plan.prefill
        assert plan.num_steps == 1
    cell.step()  # at the speed of a decode step
    assert cell.step().num_steps == FAST_STEPS
    cell.add("waits")
    assert cell.step().num_steps == 1
    cell.core.cancel(("waits", 1))
    assert cell.step().num_steps == FAST_STEPS


def test_a_prompt_waits_for_no_more_than_the_plans_in_flight() -> None:
    cell = decoding(depth=2)
    assert [cell.plan().num_steps for _ in range(2)] == [FAST_STEPS] * 2
    assert cell.core.plan("w") is None
    cell.add("b")
    cell.absorb()
    assert cell.plan().prefill


@pytest.mark.parametrize("num", [1, 2])
def test_no_plan_goes_beyond_the_end_of_a_sequence(num: int) -> None:
    cell = decoding()
    cell.add("b", max_tokens=1 + num)
    cell.step()
    assert cell.step().num_steps == num
    assert cell.step().num_steps == FAST_STEPS
    full = Cell(max_model_len=4 + num)
    full.add("a", max_tokens=None)
    full.step()
    assert full.step().num_steps == num


@pytest.mark.parametrize("num", [1, 2])
def test_no_plan_goes_beyond_a_clients_credit(num: int) -> None:
    by_tokens, by_bytes = decoding(), decoding()
    sequence = by_tokens.core.sequences["a", 1]
    sequence.max_emitted = len(sequence.emitted) + num
    assert by_tokens.step().num_steps == num
    sequence = by_bytes.core.sequences["a", 1]
    sequence.max_bytes = sequence.num_bytes + 4 * num + 1
    assert by_bytes.step().num_steps == num


def test_a_plan_in_flight_counts_as_credit_that_is_used() -> None:
    cell = decoding(depth=2)
    sequence = cell.core.sequences["a", 1]
    sequence.max_emitted = len(sequence.emitted) + FAST_STEPS + 1
    assert [cell.plan().num_steps for _ in range(2)] == [FAST_STEPS, 1]
    assert cell.core.plan("w") is None


def test_a_plan_has_the_steps_that_there_are_blocks_for() -> None:
    cell = decoding()
    pool = cell.core.workers["w"].pool
    others = pool.try_allocate(pool.num_free)
    assert cell.step().num_steps == 1, "a block is full"
    pool.free(others[:1])
    assert [cell.step().num_steps for _ in range(2)] == [FAST_STEPS, 1]
    pool.free(others[1:])
    assert cell.step().num_steps == FAST_STEPS
    assert cell.core.planner.preemption.num == 0


def test_drafts_are_as_many_in_each_step_of_a_plan() -> None:
    cell = decoding(num_speculative_tokens=2, num_steps_before=2)
    plan = cell.step()
    assert (plan.num_steps, plan.draft_depth) == (FAST_STEPS, 2)
    assert plan.decode[0].verify_depth == 2
    cell.core.workers["w"].draft_depth.now = 1
    assert cell.step().num_steps == 1, "the depth changes"
    assert cell.step().num_steps == FAST_STEPS


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("stop", [0, 7])
@pytest.mark.parametrize("depth", [1, 2])
def test_texts_and_blocks_are_as_with_single_steps(depth: int, stop: int, num_drafts: int) -> None:
    """Some end in the middle of a plan."""
    cell = Cell(depth, stop=stop, num_speculative_tokens=num_drafts)
    lengths = {"a": 40, "b": 23, "c": 31}
    for name, length in lengths.items():
        cell.add(name, max_tokens=length)
    num_long = num_short = 0
    while cell.core.sequences or cell.results:
        while len(cell.results) < depth and cell.core.sequences and cell.core.workers_in_need:
            planned = cell.core.plan("w")
            if planned is None:
                break
            num_long += planned.plan.num_steps > 1
            cell.results.append(cell.worker.step(planned))
        num_short += len(cell.absorb().rows) > 0
    assert num_long > 0
    assert cell.texts == {
        name: expected_text([0, 1, 2], length, stop) for name, length in lengths.items()
    }
    assert cell.core.workers["w"].pool.num_free == cell.capacity.num_blocks


def in_flight() -> tuple[Cell, StepResult, TokenArrays]:
    """A cell, and the true result of its plan of FAST_STEPS."""
    cell = decoding()
    cell.plan()
    return cell, *cell.results[0]


def lie(cell: Cell, rows: list[ResultRow], num_steps: int = FAST_STEPS) -> str:
    """The reason why the cell rejects the result."""
    result = StepResult(2, rows, num_steps=num_steps)
    num = sum(row.run.num_tokens for row in rows)
    with pytest.raises(CodecError) as caught:
        check_result(cell.core.workers["w"], result, TokenArrays(np.zeros(num, np.int32)))
    return str(caught.value)


def test_a_result_brings_no_more_than_its_plan_asked_for() -> None:
    cell, result, arrays = in_flight()
    check_result(cell.core.workers["w"], result, arrays)
    row = result.rows[0]
    assert len(result.rows) == result.num_steps == FAST_STEPS
    assert "4 steps, the plan asked for 3" in lie(cell, result.rows, FAST_STEPS + 1)
    assert "two rows of a kind" in lie(cell, [row] * (FAST_STEPS + 1))
    assert "two rows of a kind" in lie(cell, [row] * 2, num_steps=1)
    end = msgspec.structs.replace(row, finish="stop")
    assert "after its end" in lie(cell, [row, end, row])
    two = msgspec.structs.replace(row, run=TokenRun(2))
    assert "2 tokens where 1 belong" in lie(cell, [two, two])


def test_a_worker_that_dies_in_a_plan_of_several_steps_takes_nothing_of_it_with_it() -> None:
    cell = decoding()
    before = list(cell.texts["a"])
    assert cell.plan().num_steps == FAST_STEPS
    assert cell.core.remove_worker("w", 0) == []
    sequence = cell.core.sequences["a", 1]
    assert sequence.emitted == before
    assert sequence.is_isolated
    cell.core.add_worker("w", CAPACITY, PROBATION_STEPS)
    cell.worker, cell.results = SimulatedWorker(CAPACITY, is_fast=True), []
    assert {cell.step().num_steps for _ in range(3)} == {1, FAST_STEPS}
    assert cell.texts["a"] == expected_text([0, 1, 2], len(cell.texts["a"]), stop=0)


def test_results_of_a_cancelled_sequence_are_skipped() -> None:
    cell = decoding()
    cell.plan()
    num_free = cell.core.workers["w"].pool.num_free
    cell.core.cancel(("a", 1))
    assert cell.core.workers["w"].pool.num_free == num_free, "the plan may still write to them"
    cell.absorb()
    assert len(cell.texts["a"]) == 1
    assert cell.core.workers["w"].pool.num_free == CAPACITY.num_blocks
