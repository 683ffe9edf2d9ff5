"""The reason why the first waiting sequence waits."""

from typing import Any

import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.prefills import PrefillLimits
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import WaitReason
from services.scheduler.worker_state import PROBATION_STEPS
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64,
                    max_model_len=128)  # fmt: skip


def core_of(limits: PrefillLimits | None = None, depth: int = 1, **capacity: Any) -> Scheduler:
    core = Scheduler(100, 10, pipeline_depth=depth, prefill_limits=limits or PrefillLimits())
    core.add_worker("w", replaced(**capacity))
    return core


def replaced(**capacity: Any) -> Capacity:
    fields = {name: getattr(CAPACITY, name) for name in CAPACITY.__struct_fields__}
    return Capacity(**(fields | capacity))


def add(core: Scheduler, name: str, prompt_len: int = 3, first_id: int = 0, **fields: Any) -> None:
    params = SamplingParams(seed=0, max_tokens=fields.pop("max_tokens", 20))
    add_one(core, name, range(first_id, first_id + prompt_len), params, 0, **fields)


@pytest.mark.parametrize(
    ("wait_reason", "capacity", "limits", "prompts"),
    [
        (WaitReason.SLOTS, {"max_num_seqs": 1}, None, [3, 3]),
        (WaitReason.KV_BLOCKS, {"num_blocks": 8}, None, [24, 24]),
        (WaitReason.STEP_BUDGET, {"max_num_batched_tokens": 8}, None, [8, 3]),
        (WaitReason.LONG_PREFILLS, {"max_num_batched_tokens": 8}, None, [30, 31]),
        (
            WaitReason.PARTIAL_PREFILLS,
            {"max_num_batched_tokens": 8},
            PrefillLimits(max_partial=1, long_threshold=6),
            [7, 3],
        ),
        (WaitReason.PLANS_IN_FLIGHT, {}, None, [3, 3]),
    ],
)
def test_a_plan_says_why_it_admitted_no_more(
    wait_reason: WaitReason, capacity: Any, limits: PrefillLimits | None, prompts: list[int]
) -> None:
    core = core_of(limits, **capacity)
    for number, prompt_len in enumerate(prompts):
        add(core, str(number), prompt_len, first_id=1000 * number, max_tokens=8)
    core.plan("w")
    assert core.wait_reason == wait_reason
    assert len(core.queues.waiting) == (wait_reason != WaitReason.PLANS_IN_FLIGHT)


def test_a_worker_on_probation_is_a_reason_to_wait() -> None:
    core, worker = core_of(), SimulatedWorker(CAPACITY)
    add(core, "long", max_tokens=100)
    for _ in range(PROBATION_STEPS):
        core.absorb("w", *worker.step(core.plan("w")))
    core.add_worker("new", CAPACITY)
    add(core, "a")
    add(core, "b")
    core.plan("new")
    assert core.wait_reason == WaitReason.PROBATION, "it gets one at a time"


def test_a_better_worker_is_a_reason_to_wait_and_so_is_none() -> None:
    core, reasons = core_of(), []
    core.add_worker("other", CAPACITY)
    add(core, "a")
    add(core, "b")
    core.plan("w")
    reasons.append(core.wait_reason)
    for name in ("w", "other"):
        core.remove_worker(name, 0)
    reasons.append(core.wait_reason)
    assert reasons == [WaitReason.PLACEMENT, WaitReason.NO_WORKER]
