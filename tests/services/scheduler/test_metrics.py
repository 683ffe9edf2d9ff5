"""The scheduler's metrics of its plans and sequences."""

import time
from collections.abc import Callable

import msgspec
import pytest
from prometheus_client import REGISTRY

from benchmarks.harness.sequences import add_one
from services.scheduler.metrics import CoreMetrics, StepMetrics
from services.scheduler.scheduler import Planned, Scheduler
from shared.wire.messages import (
    Capacity,
    Overview,
    ResultRow,
    RunKind,
    SamplingParams,
    StepResult,
    TokenRun,
)
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=8,
                    max_model_len=64)  # fmt: skip

Change = Callable[[str], float]


@pytest.fixture
def core() -> Scheduler:
    core = Scheduler(max_waiting=10, priority_step_s=10)
    core.add_worker("w", CAPACITY)
    return core


def add(core: Scheduler, name: str, prompt_len: int, now_s: float, priority: int = 0) -> None:
    params = SamplingParams(seed=0, max_tokens=2)
    add_one(core, name, range(prompt_len), params, now_s, priority=priority)


def begin(core: Scheduler, steps: StepMetrics, planned_s: float) -> Planned:
    planned = core.plan("w")
    assert planned is not None
    steps.begin("w", planned, planned_s - 0.5, planned_s)
    return planned


def test_a_step_counts_its_sequences_and_tokens_and_the_time_its_plan_took(
    core: Scheduler, change: Change
):
    steps, worker = StepMetrics(core), SimulatedWorker(CAPACITY)
    add(core, "a", prompt_len=3, now_s=0)
    core.absorb("w", *worker.step(begin(core, steps, 1)))
    add(core, "b", prompt_len=4, now_s=1)
    begin(core, steps, 2)
    assert change("shoal_step_sequences_count") == 2
    assert change("shoal_step_sequences_sum") == 1 + 2
    assert change("vllm:iteration_tokens_total_sum") == 3 + (1 + 4)
    assert change("shoal_plan_seconds_sum") == pytest.approx(2 * 0.5)


def test_drafts_to_verify_count_among_the_tokens_of_a_step(change: Change):
    core = Scheduler(max_waiting=10, priority_step_s=10)
    capacity = msgspec.structs.replace(CAPACITY, num_speculative_tokens=2)
    core.add_worker("w", capacity)
    steps, worker = StepMetrics(core), SimulatedWorker(capacity)
    add(core, "a", prompt_len=3, now_s=0)
    core.absorb("w", *worker.step(begin(core, steps, 1)))
    begin(core, steps, 2)
    assert change("vllm:iteration_tokens_total_sum") == 3 + (1 + 2)


def test_drafts_are_counted_as_verified_and_as_accepted_at_each_position(
    core: Scheduler, change: Change
):
    def accepted(position: int) -> float:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        return REGISTRY.get_sample_value(name, {"position": str(position)}) or 0

    before = [accepted(position) for position in range(3)]
    verified = [
        ResultRow(
            slot,
            "r",
            1,
            TokenRun(1 + num_accepted, num_drafts=num_drafts, num_accepted=num_accepted),
        )
        for slot, (num_drafts, num_accepted) in enumerate([(3, 3), (3, 1), (1, 0), (0, 0)])
    ]
    told = ResultRow(0, "r", 1, TokenRun(3, kind=RunKind.DRAFTS, num_drafts=3, num_accepted=3))
    result = StepResult(1, [told, *verified], step_s=2.5)
    StepMetrics(core).end("w", result, now_s=10)
    assert change("vllm:spec_decode_num_drafts_total") == 3
    assert change("vllm:spec_decode_num_draft_tokens_total") == 3 + 3 + 1
    assert change("vllm:spec_decode_num_accepted_tokens_total") == 3 + 1
    assert [accepted(position) - before[position] for position in range(3)] == [2, 1, 1]
    assert change("shoal_step_seconds_sum") == pytest.approx(2.5)


def test_the_draft_depth_of_each_worker_is_told_as_long_as_it_is_there():
    def depth(worker_id: str) -> float | None:
        return REGISTRY.get_sample_value("shoal_draft_depth", {"worker": worker_id})

    core = Scheduler(max_waiting=10, priority_step_s=10)
    core.add_worker("w", msgspec.structs.replace(CAPACITY, num_speculative_tokens=2))
    steps = StepMetrics(core)
    add(core, "a", prompt_len=3, now_s=0)
    begin(core, steps, 1)
    assert depth("w") == 2
    core.remove_worker("w", 0)
    steps.forget("w")
    assert depth("w") is None


def test_a_sequence_waits_from_its_arrival_until_its_first_step_and_once(
    core: Scheduler, change: Change
):
    steps = StepMetrics(core)
    add(core, "a", prompt_len=3, now_s=100, priority=5)
    begin(core, steps, 107)
    core.remove_worker("w", 0)
    core.add_worker("w", CAPACITY)
    begin(core, steps, 150)
    assert change("vllm:request_queue_time_seconds_count") == 1
    assert change("vllm:request_queue_time_seconds_sum") == pytest.approx(7)


def test_the_age_of_a_step_is_that_of_the_oldest_plan_nobody_has_answered(core: Scheduler):
    def age() -> float:
        return REGISTRY.get_sample_value("shoal_step_age_seconds") or 0.0

    steps, worker = StepMetrics(core), SimulatedWorker(CAPACITY)
    assert age() == 0
    add(core, "a", prompt_len=3, now_s=0)
    planned = begin(core, steps, time.monotonic() - 1000)
    assert age() >= 1000
    core.absorb("w", *worker.step(planned))
    assert age() == 0
    begin(core, steps, time.monotonic() - 1000)
    core.remove_worker("w", 0)
    steps.forget("w")
    assert age() == 0


def test_sequences_put_back_after_their_workers_death_are_counted_and_no_others(
    core: Scheduler, change: Change
):
    metrics = CoreMetrics(core)
    for name in ("a", "b", "waits"):
        add(core, name, prompt_len=3, now_s=0)
    core.plan("w")
    core.cancel(("b", 1))
    core.remove_worker("w", 0)
    metrics.count()
    metrics.count()
    assert change("shoal_requeues_total") == 1


def test_the_overview_has_the_figures_of_all_workers(core: Scheduler):
    metrics = CoreMetrics(core)
    core.add_worker("other", CAPACITY)
    core.workers["other"].admits = False
    for name in ("a", "b", "c"):
        add(core, name, prompt_len=5, now_s=0)
    core.plan("w")
    assert metrics.overview("s1") == Overview(
        "s1",
        num_workers=2,
        num_running=2,
        num_waiting=1,
        num_blocks=32,
        num_free_blocks=28,
        num_slots=2 * CAPACITY.max_num_seqs,
    )


def test_prompt_tokens_count_as_queries_and_cached_ones_as_hits(core: Scheduler, change: Change):
    metrics, worker = CoreMetrics(core), SimulatedWorker(CAPACITY)
    for name in ("a", "b"):
        add(core, name, prompt_len=7, now_s=0)
        while core.sequences:
            core.absorb("w", *worker.step(core.plan("w")))
        metrics.count()
    assert change("vllm:prefix_cache_queries_total") == 14
    assert change("vllm:prefix_cache_hits_total") == 4


def test_shared_and_cached_blocks_are_no_leak_but_unowned_ones_are(core: Scheduler):
    def leak() -> float:
        return REGISTRY.get_sample_value("shoal_kv_block_leak") or 0.0

    metrics, worker = CoreMetrics(core), SimulatedWorker(CAPACITY)
    add(core, "a", prompt_len=7, now_s=0)
    core.absorb("w", *worker.step(core.plan("w")))
    add(core, "b", prompt_len=7, now_s=0)
    planned = core.plan("w")
    assert metrics.overview("s").num_free_blocks == 16 - 3, "one block of two is shared"
    assert leak() == 0
    core.absorb("w", *worker.step(planned))
    assert leak() == 0
    core.workers["w"].pool.try_allocate(2)
    assert leak() == 2
