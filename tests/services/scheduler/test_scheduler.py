"""Single rules of the core that random schedules do not show by name."""

import numpy as np
import pytest

from services.scheduler.scheduler import MAX_WORKER_DEATHS, Scheduler
from shared.errors import InternalError, InvalidRequest
from shared.messages import Capacity, Generate, SamplingParams, StepResult
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=8,
                    max_model_len=64)  # fmt: skip


def scheduler(capacity: Capacity = CAPACITY) -> Scheduler:
    core = Scheduler(max_waiting=10)
    core.add_worker("w", capacity)
    return core


def add(core: Scheduler, name: str, prompt_len: int = 3, max_tokens: int | None = 5) -> None:
    params = SamplingParams(seed=0, max_tokens=max_tokens)
    core.add(Generate(name, 1, 0, params), np.arange(prompt_len, dtype=np.int32), 0)


def test_a_request_that_kills_its_worker_again_and_again_fails_and_others_do_not():
    core = Scheduler(max_waiting=10)
    core.add_worker("0", CAPACITY)
    add(core, "poison", prompt_len=8)  # takes a whole step of its own
    add(core, "innocent")
    for death in range(MAX_WORKER_DEATHS):
        core.plan(str(death))
        assert core.remove_worker(str(death)) == []
        core.add_worker(str(death + 1), CAPACITY)
    core.plan(str(MAX_WORKER_DEATHS))
    (refusal,) = core.remove_worker(str(MAX_WORKER_DEATHS))
    assert refusal.sequence.request == "poison"
    assert isinstance(refusal.error, InternalError)
    assert [sequence.request for sequence in core.waiting] == ["innocent"]


def test_a_worker_lost_between_two_steps_is_nobodys_fault():
    core = scheduler()
    add(core, "r")
    for _ in range(MAX_WORKER_DEATHS + 3):
        worker = SimulatedWorker(CAPACITY)
        core.absorb("w", *worker.step(core.plan("w")))
        assert core.remove_worker("w") == []
        core.add_worker("w", CAPACITY)
        if not core.sequences:
            break
    assert not core.sequences, "it ended well"


def test_what_fits_on_no_worker_any_more_fails_and_does_not_hold_up_the_line():
    core = scheduler()
    add(core, "large", prompt_len=40, max_tokens=20)
    add(core, "small")
    core.plan("w")
    assert core.remove_worker("w") == []
    (refusal,) = core.add_worker("w", Capacity(8, 4, 4, 8, 64))
    assert refusal.sequence.request == "large"
    assert isinstance(refusal.error, InvalidRequest)
    assert [admit.request for admit in core.plan("w").plan.admit] == ["small"]


def test_a_worker_that_leaves_ends_what_it_has_and_gets_nothing_new():
    core = scheduler()
    worker = SimulatedWorker(CAPACITY)
    add(core, "old")
    core.absorb("w", *worker.step(core.plan("w")))
    add(core, "new")
    plan = core.plan("w", admits=False).plan
    assert (len(plan.decode), len(plan.admit)) == (1, 0)


def test_a_result_of_another_step_and_rows_of_another_request_are_ignored():
    core = scheduler()
    worker = SimulatedWorker(CAPACITY)
    add(core, "r")
    result, ids = worker.step(core.plan("w"))
    assert core.absorb("w", StepResult(result.step + 1, result.rows), ids) == []
    assert core.workers["w"].in_flight is not None
    core.absorb("w", result, ids)
    assert core.absorb("w", result, ids) == []


def test_cancelling_while_the_plan_is_in_flight_frees_the_blocks_with_its_result():
    core = scheduler()
    worker = SimulatedWorker(CAPACITY)
    add(core, "r")
    output = worker.step(core.plan("w"))
    core.cancel(("r", 1))
    core.cancel(("r", 1))
    assert core.workers["w"].pool.num_free < CAPACITY.num_blocks
    assert core.absorb("w", *output) == []
    assert core.workers["w"].pool.num_free == CAPACITY.num_blocks
    assert core.plan("w").plan.release, "the worker forgets it too"
    assert not core.sequences


def test_when_blocks_run_out_the_youngest_waits_and_ends_with_the_same_text():
    tight = Capacity(6, 4, 4, 8, 24)
    core, worker = scheduler(tight), SimulatedWorker(tight)
    for name in ("a", "b", "c"):
        add(core, name, prompt_len=4, max_tokens=14)
    texts: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    while core.sequences:
        result, ids = worker.step(core.plan("w"))
        for each in core.absorb("w", result, ids):
            texts[each.sequence.request] += ids[each.start : each.start + each.num_tokens].tolist()
    assert core.num_preemptions > 0
    assert texts["a"] == texts["b"] == texts["c"], "equal prompts write equal texts"
    assert len(texts["a"]) == 14


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(63, 1), (1, 63), (1, None), (63, None)])
def test_what_fits_exactly_is_accepted_and_ends(prompt_len: int, max_tokens: int | None):
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "r", prompt_len, max_tokens)
    num_tokens = 0
    while core.sequences:
        num_tokens += len(core.absorb("w", *worker.step(core.plan("w"))))
    assert num_tokens == (max_tokens or 64 - prompt_len)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(64, None), (64, 1), (60, 5)])
def test_what_does_not_fit_is_refused_with_both_numbers(prompt_len: int, max_tokens: int | None):
    with pytest.raises(InvalidRequest, match=rf"64 tokens.*prompt has {prompt_len}"):
        add(scheduler(), "r", prompt_len, max_tokens)
