"""Plans for a worker with a pipeline."""

from collections import deque

import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.scheduler import Planned, Scheduler
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

NUM_TOKENS = 12


def core_of(num_stages: int, budget: int = 64) -> tuple[Scheduler, SimulatedWorker]:
    capacity = Capacity(64, 4, 16, budget, 64, num_stages=num_stages)
    core = Scheduler(max_waiting=100, priority_step_s=1, pipeline_depth=2)
    core.add_worker("w", capacity)
    return core, SimulatedWorker(capacity)


def slots_of(planned: Planned) -> set[int]:
    return {row.slot for row in planned.plan.decode}


@pytest.mark.parametrize("num_stages", [2, 3])
def test_concurrent_plans_of_stages_share_no_decoding_sequence(
    num_stages: int,
) -> None:
    core, worker = core_of(num_stages)
    for number in range(7):
        add_one(core, str(number), [number, 1], SamplingParams(seed=0, max_tokens=NUM_TOKENS))
    in_flight: deque[Planned] = deque()
    sizes, most = [], 0
    while core.sequences:
        while planned := core.plan("w"):
            beside = list(in_flight)[-(num_stages - 1) :]
            assert not any(slots_of(planned) & slots_of(each) for each in beside)
            in_flight.append(planned)
            sizes.append(len(planned.plan.decode))
        most = max(most, len(in_flight))
        core.absorb("w", *worker.step(in_flight.popleft()))
    decoding = [size for size in sizes if size]
    assert most == num_stages + 1
    assert max(decoding) == -(-7 // num_stages), "a plan has its share"
    assert len(decoding) == (NUM_TOKENS - 1) * num_stages, "and none has less than it could"


def test_chunks_of_a_prompt_follow_each_other_at_once() -> None:
    core, worker = core_of(2, budget=8)
    add_one(core, "r", [1] * 24, SamplingParams(seed=0, max_tokens=1))
    planned = [core.plan("w") for _ in range(4)]
    assert [each and each.plan.prefill[0].num_tokens for each in planned] == [8, 8, 8, None]
    for each in planned[:3]:
        assert each is not None
        core.absorb("w", *worker.step(each))
    assert not core.sequences


def test_one_sequence_is_in_one_plan_at_a_time() -> None:
    core, worker = core_of(2)
    add_one(core, "r", [1], SamplingParams(seed=0, max_tokens=3))
    for _ in range(3):
        planned = core.plan("w")
        assert planned is not None
        assert core.plan("w") is None
        core.absorb("w", *worker.step(planned))
    assert not core.sequences
