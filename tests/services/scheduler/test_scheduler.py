"""Single rules of the core that random schedules do not show by name."""

from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.placement import MAX_LAG_STEPS
from services.scheduler.results import Emission, check_result
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.sequence import MAX_FORGIVEN, MAX_WORKER_DEATHS, Arrival
from services.scheduler.worker_state import PROBATION_STEPS
from shared.errors import CodecError, InternalError, InvalidRequest, Overloaded, Unavailable
from shared.wire.messages import (
    NO_TOKENS,
    WINDOW_BYTES,
    Capacity,
    Generate,
    Grant,
    NewSequence,
    ResultRow,
    SamplingParams,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=8,
                    max_model_len=64)  # fmt: skip


def scheduler(capacity: Capacity = CAPACITY) -> Scheduler:
    core = Scheduler(max_waiting=10, priority_step_s=10)
    core.add_worker("w", capacity)
    return core


def add(
    core: Scheduler,
    name: str,
    prompt_len: int = 3,
    max_tokens: int | None = 5,
    priority: int = 0,
    now_s: float = 0,
) -> None:
    params = SamplingParams(seed=0, max_tokens=max_tokens)
    add_one(core, name, range(prompt_len), params, now_s, priority=priority)


def step(core: Scheduler, worker: SimulatedWorker, worker_id: str = "w") -> list[Emission]:
    return core.absorb(worker_id, *worker.step(core.plan(worker_id)))


def in_slots(core: Scheduler, worker_id: str = "w") -> set[str]:
    return {sequence.request for sequence in core.workers[worker_id].running.values()}


def computed(core: Scheduler, worker_id: str = "w") -> set[str]:
    """The sequences computed by the plan in flight."""
    worker = core.workers[worker_id]
    return {worker.running[slot].request for slot in worker.computed_slots()}


def test_a_worker_that_comes_from_another_cell_has_shown_that_it_works():
    core = scheduler()
    core.add_worker("newcomer", CAPACITY)
    core.add_worker("known", CAPACITY, PROBATION_STEPS)
    assert {name for name, each in core.workers.items() if each.is_proven} == {"known"}


def test_a_worker_that_only_stood_still_is_forgiven_as_often_as_its_bound_allows():
    core = Scheduler(max_waiting=10, priority_step_s=10)
    core.add_worker("w/0", CAPACITY)
    add(core, "r")
    add(core, "s")
    for number in range(MAX_FORGIVEN + 1):
        core.plan(f"w/{number}")
        assert core.remove_worker(f"w/{number}", 0) == []
        core.add_worker(f"w/{number + 1}", CAPACITY)
        core.forgive("v")
        assert len(core.queues.isolated) == 2, "another one did"
        core.forgive("w")
        is_bound_reached = number == MAX_FORGIVEN
        assert len(core.queues.isolated) == (2 if is_bound_reached else 0)
        assert len(core.queues.waiting) == (0 if is_bound_reached else 2)


def test_a_forgiven_stall_does_not_excuse_another_death():
    core = scheduler()
    add(core, "r")
    (sequence,) = core.sequences.values()
    for worker_id in ("v/0", "w/0"):
        sequence.note_worker_death(worker_id)
    core.forgive("w")
    assert sequence.num_worker_deaths == 1
    assert sequence.is_isolated


def test_a_request_that_kills_its_worker_takes_two_and_no_other_request_with_it():
    core = scheduler()
    for name in ("poison", "innocent", "another"):
        add(core, name, prompt_len=2)
    core.plan("w")
    assert computed(core) == {"poison", "innocent", "another"}
    assert core.remove_worker("w", 0) == []
    core.add_worker("w", CAPACITY)
    core.plan("w")
    assert computed(core) == {"poison"}, "each suspect is computed alone"
    (refusal,) = core.remove_worker("w", 0)
    assert refusal.sequence.request == "poison"
    assert isinstance(refusal.error, InternalError)
    core.add_worker("w", CAPACITY)
    worker = SimulatedWorker(CAPACITY)
    while core.sequences:
        step(core, worker)


def test_suspects_and_others_take_turns_and_one_that_emitted_is_none_any_more():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "suspect")
    core.plan("w")
    core.remove_worker("w", 0)
    core.add_worker("w", CAPACITY)
    add(core, "a")
    core.note_state("w", is_ready=False)
    assert core.plan("w") is None
    core.note_state("w", is_ready=True)
    assert core.plan("w") is not None
    assert computed(core) == {"suspect"}
    (planned,) = core.workers["w"].in_flight
    core.absorb("w", *worker.step(Planned(planned, np.arange(3, dtype=np.int32))))
    core.plan("w")
    assert computed(core) == {"suspect", "a"}


def test_a_sequence_may_lose_workers_as_long_as_it_goes_on_but_not_for_ever():
    core = scheduler()
    add(core, "r", max_tokens=50)
    for _ in range(MAX_WORKER_DEATHS):
        step(core, SimulatedWorker(CAPACITY))
        core.plan("w")
        assert core.remove_worker("w", 0) == []
        core.add_worker("w", CAPACITY)
    step(core, SimulatedWorker(CAPACITY))
    core.plan("w")
    assert len(core.remove_worker("w", 0)) == 1


def test_workers_that_leave_on_purpose_within_a_step_are_nobodys_fault():
    core = scheduler()
    add(core, "r")
    for _ in range(MAX_WORKER_DEATHS + 3):
        core.plan("w")
        assert computed(core) == {"r"}
        assert core.remove_worker("w", 0, is_explained=True) == []
        core.add_worker("w", CAPACITY)
    core.plan("w")
    assert core.remove_worker("w", 0) == []


def test_a_worker_lost_between_two_steps_is_nobodys_fault():
    core = scheduler()
    add(core, "r")
    for _ in range(MAX_WORKER_DEATHS + 3):
        step(core, SimulatedWorker(CAPACITY))
        assert core.remove_worker("w", 0) == []
        core.add_worker("w", CAPACITY)
        if not core.sequences:
            break
    assert not core.sequences, "it ended well"


def test_released_sequences_wait_for_another_worker():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "r")
    output = worker.step(core.plan("w"))
    core.release_worker("w")
    assert core.workers["w"].running, "its plan in flight comes back first"
    assert len(core.absorb("w", *output)) == 1
    assert core.plan("w").plan.release
    assert [sequence.request for sequence in core.queues.waiting] == ["r"]
    core.add_worker("other", CAPACITY)
    assert core.plan("other").plan.admit[0].num_ids == 4


def test_a_worker_that_leaves_hands_over_one_sequence_when_the_one_before_has_caught_up():
    core, workers = scheduler(), {each: SimulatedWorker(CAPACITY) for each in ("w", "other")}
    for name in ("first", "second", "third"):
        add(core, name)
    step(core, workers["w"])
    core.add_worker("other", CAPACITY)
    core.release_worker("w")

    def running(worker_id: str) -> list[str]:
        return [each.request for each in core.workers[worker_id].running.values()]

    for num_gone in (1, 2, 3):
        step(core, workers["w"])
        assert len(running("w")) == 3 - num_gone, "the others are computed meanwhile"
        assert [each.request for each in core.queues.waiting] == ["first", "second", "third"][
            num_gone - 1 : num_gone
        ]
        core.absorb("other", *workers["other"].step(core.plan("other")))
    assert running("other") == ["first", "second", "third"]


def test_a_worker_that_has_no_time_left_hands_over_all_at_once():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for name in ("first", "second", "third"):
        add(core, name)
    step(core, worker)
    core.add_worker("other", CAPACITY)
    core.release_worker("w")
    assert len(core.queues.waiting) == 1
    core.release_worker("w")
    assert len(core.queues.waiting) == 3


def test_the_rest_waits_if_no_worker_takes_the_released_sequence():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for name in ("first", "second"):
        add(core, name)
    step(core, worker)
    core.add_worker("other", CAPACITY)
    core.release_worker("w")
    assert len(core.workers["w"].running) == 1
    core.remove_worker("other", 0)
    assert not core.workers["w"].running
    assert [each.request for each in core.queues.waiting] == ["first", "second"]


def test_a_sequence_without_credit_is_not_computed_until_its_client_reads():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "slow", max_tokens=40)
    core.sequences["slow", 1].max_emitted = 2
    step(core, worker)
    step(core, worker)
    assert core.plan("w") is None
    core.grant(Grant("slow", 1, 3, WINDOW_BYTES))
    step(core, worker)
    assert core.plan("w") is None
    core.grant(Grant("slow", 1, 100, 12))
    core.sequences["slow", 1].max_bytes = 12
    assert core.plan("w") is None, "three ids are twelve bytes"


def test_a_sequence_of_a_slow_client_yields_and_resumes():
    capacity = Capacity(16, 4, 1, 8, 64)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    add(core, "slow", max_tokens=5)
    core.sequences["slow", 1].max_emitted = 1
    step(core, worker)
    add(core, "quick", max_tokens=5)
    for _ in range(5):
        (emission,) = step(core, worker)
        assert emission.sequence.request == "quick"
    assert list(core.queues.paused) == [core.sequences["slow", 1]]
    core.grant(Grant("slow", 1, 100, WINDOW_BYTES))
    while core.sequences:
        step(core, worker)


def test_a_step_of_priority_is_worth_so_many_seconds_of_waiting():
    core = scheduler(Capacity(16, 4, 1, 8, 64))
    add(core, "old", now_s=0)
    add(core, "later but urgent", now_s=9, priority=-1)
    add(core, "too late", now_s=11, priority=-1)
    add(core, "not urgent", now_s=0, priority=2)
    expected = ["later but urgent", "old", "too late", "not urgent"]
    assert [sequence.request for sequence in core.queues.waiting] == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_one_of_a_later_priority_gives_way_and_goes_on_where_it_was(depth: int):
    capacity = Capacity(16, 4, 2, 8, 64)
    core = Scheduler(max_waiting=10, priority_step_s=10, pipeline_depth=depth)
    core.add_worker("w", capacity)
    worker = SimulatedWorker(capacity)
    for name in ("first of a batch", "second of a batch"):
        add(core, name, max_tokens=20, priority=100)
    for _ in range(4):
        step(core, worker)
    second = core.sequences["second of a batch", 1]
    num_emitted = len(second.emitted)
    add(core, "as late", now_s=5, priority=100)
    add(core, "urgent", now_s=5, max_tokens=3)
    step(core, worker)
    assert in_slots(core) == {"first of a batch", "urgent"}
    assert len(second.emitted) == num_emitted
    assert core.planner.preemption.num == 1
    while "second of a batch" in {sequence.request for sequence in core.sequences.values()}:
        step(core, worker)
    assert len(second.emitted) == 20
    assert core.planner.preemption.num == 1


def test_a_sequence_does_not_yield_to_equals_to_rooms_elsewhere_or_after_a_long_wait():
    capacity = Capacity(16, 4, 1, 8, 64)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    add(core, "runs", max_tokens=9, priority=3)
    step(core, worker)
    add(core, "equal", now_s=1, priority=3)
    add(core, "urgent, too late", now_s=31)
    step(core, worker)
    assert in_slots(core) == {"runs"}
    core.cancel(("equal", 1))
    core.cancel(("urgent, too late", 1))
    core.add_worker("v", capacity)
    add(core, "urgent", now_s=1)
    step(core, worker)
    assert in_slots(core) == {"runs"}
    core.plan("v")
    assert computed(core, "v") == {"urgent"}
    assert core.planner.preemption.num == 0


def test_none_gives_way_in_vain_to_a_long_prompt_that_has_to_wait_for_another():
    capacity = Capacity(32, 4, 2, 8, 64)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    add(core, "of a batch", priority=100, max_tokens=20)
    step(core, worker)
    add(core, "long", prompt_len=40)
    step(core, worker)
    add(core, "long too", prompt_len=40)
    num_steps = 0
    while core.sequences["long", 1].num_to_compute > capacity.max_num_batched_tokens:
        assert in_slots(core) == {"long", "of a batch"}
        step(core, worker)
        num_steps += 1
    assert num_steps > 2
    while "long too" not in in_slots(core):
        step(core, worker)
    assert "of a batch" not in in_slots(core)
    assert core.planner.preemption.num == 1


def test_none_gives_way_where_all_its_blocks_would_not_do():
    capacity = Capacity(20, 4, 4, 16, 80)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    add(core, "grows", prompt_len=20, max_tokens=40)
    add(core, "of a batch", prompt_len=8, max_tokens=20, priority=100)
    for _ in range(4):
        step(core, worker)
    add_one(core, "large", range(100, 160), SamplingParams(seed=0, max_tokens=5), 0)
    for _ in range(4):
        step(core, worker)
    assert in_slots(core) == {"grows", "of a batch"}
    assert core.planner.preemption.num == 0


def test_room_of_a_paused_sequence_and_of_a_later_priority_together():
    capacity = Capacity(20, 4, 4, 32, 80)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    add(core, "paused", prompt_len=24, max_tokens=20)
    core.sequences["paused", 1].max_emitted = 1
    add_one(core, "of a batch", range(200, 224), SamplingParams(seed=0, max_tokens=20), priority=9)
    for _ in range(4):
        step(core, worker)
    assert in_slots(core) == {"paused", "of a batch"}
    add_one(core, "large", range(100, 164), SamplingParams(seed=0, max_tokens=5))
    for _ in range(3):
        step(core, worker)
    assert in_slots(core) == {"large"}
    assert core.planner.preemption.num == 2


def test_a_worker_that_hangs_has_no_room_for_which_others_would_keep_theirs():
    capacity = Capacity(16, 4, 2, 8, 64)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    core.add_worker("hangs", capacity)
    add(core, "a", max_tokens=60, priority=100)
    hanging = SimulatedWorker(capacity)
    for _ in range(20):
        step(core, hanging, "hangs")
    assert core.plan("hangs") is not None
    for name in ("b", "c"):
        add(core, name, max_tokens=60, priority=100)
    while len(in_slots(core)) < 2:
        step(core, worker)
    add(core, "urgent")
    while "urgent" not in in_slots(core):
        step(core, worker)
    assert len(in_slots(core, "hangs")) == 1


def test_a_short_one_gets_its_room_behind_a_long_one_that_waits_for_another():
    capacity = Capacity(64, 4, 2, 8, 64)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    add(core, "of a batch", priority=100, max_tokens=20)
    step(core, worker)
    add(core, "long", prompt_len=56)
    step(core, worker)
    add(core, "long too", prompt_len=56)
    add(core, "short")
    step(core, worker)
    assert in_slots(core) == {"long", "short"}


def test_waiting_sequences_are_shared_out_among_the_workers():
    core = scheduler(Capacity(64, 4, 16, 64, 64))
    core.add_worker("v", Capacity(64, 4, 16, 64, 64))
    for index in range(10):
        add(core, str(index))
    core.plan("w")
    core.plan("v")
    assert [len(worker.running) for worker in core.workers.values()] == [5, 5]


def test_a_worker_that_hangs_is_not_waited_for():
    core = scheduler(Capacity(64, 4, 16, 64, 64))
    core.add_worker("hangs", Capacity(64, 4, 16, 64, 64))
    worker = SimulatedWorker(Capacity(64, 4, 16, 64, 64))
    add(core, "a", max_tokens=40)
    add(core, "b", max_tokens=40)
    core.plan("hangs")
    step(core, worker)
    for _ in range(MAX_LAG_STEPS + 1):
        step(core, worker)
    add(core, "c")
    assert [admit.request for admit in core.plan("w").plan.admit] == ["c"]


def test_a_name_that_is_taken_is_refused():
    core = scheduler()
    add(core, "r")
    with pytest.raises(InternalError):
        add(core, "r")


def test_a_sequence_that_fits_only_the_lost_worker_waits_and_delays_no_other():
    small = Capacity(8, 4, 4, 8, 64)
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    core.add_worker("small", small)
    add(core, "large", prompt_len=40, max_tokens=20)
    while core.sequences["large", 1].num_to_compute != 1:
        step(core, worker)
    assert core.remove_worker("w", now_s=100) == []
    add(core, "also small")
    assert [admit.request for admit in core.plan("small").plan.admit] == ["also small"]
    late = Unavailable("nobody came", code="no_worker")
    assert core.fail_unservable(99, lambda _: late) == [], "it may wait longer"
    core.add_worker("w", CAPACITY)
    assert core.fail_unservable(100, lambda _: late) == [], "it has found one"
    core.plan("w")
    assert "large" in computed(core)
    core.remove_worker("w", now_s=200)
    (refusal,) = core.fail_unservable(200, lambda _: late)
    assert (refusal.sequence.request, refusal.error.status) == ("large", 503)


def test_a_leaving_worker_finishes_its_sequences_and_gets_no_new_ones():
    core = scheduler()
    worker = SimulatedWorker(CAPACITY)
    add(core, "old")
    core.absorb("w", *worker.step(core.plan("w")))
    add(core, "new")
    core.note_state("w", is_ready=False)
    plan = core.plan("w").plan
    assert (len(plan.decode), len(plan.admit)) == (1, 0)


def test_the_result_of_another_step_is_an_error_of_the_worker():
    core = scheduler()
    worker = SimulatedWorker(CAPACITY)
    add(core, "r")
    result, arrays = worker.step(core.plan("w"))
    with pytest.raises(CodecError, match="step 2 came where that of step 1 was due"):
        core.absorb("w", StepResult(result.step + 1, result.rows), arrays)
    core.absorb("w", result, arrays)
    with pytest.raises(CodecError, match="step 1 came where none was due"):
        core.absorb("w", result, arrays)


def test_ids_and_logprobs_of_no_model_are_errors_of_the_worker():
    capacity = msgspec.structs.replace(CAPACITY, vocab_size=1000)
    core, worker = scheduler(capacity), SimulatedWorker(capacity)
    add(core, "r")
    result, arrays = worker.step(core.plan("w"))
    infinite = np.array([np.inf], np.float32)
    for odd, fault in (
        (TokenArrays(arrays.ids - 1000), "ids from -"),
        (TokenArrays(arrays.ids, top_ids=arrays.ids + (1 << 30)), "ids from 1"),
        (TokenArrays(arrays.ids, infinite), "logprobs from inf"),
    ):
        with pytest.raises(CodecError, match=fault):
            check_result(core.workers["w"], result, odd)
    check_result(core.workers["w"], result, arrays)


def test_cancelling_while_the_plan_is_in_flight_frees_the_blocks_with_its_result():
    core = scheduler()
    worker = SimulatedWorker(CAPACITY)
    add(core, "r")
    output = worker.step(core.plan("w"))
    core.cancel(("r", 1))
    core.cancel(("r", 1))
    assert not core.sequences
    assert core.workers["w"].pool.num_free < CAPACITY.num_blocks
    assert core.absorb("w", *output) == []
    assert core.workers["w"].pool.num_free == CAPACITY.num_blocks
    assert core.plan("w").plan.release, "the worker forgets it too"


def test_when_blocks_run_out_the_youngest_waits_and_ends_with_the_same_text():
    tight = Capacity(6, 4, 4, 8, 24)
    core, worker = scheduler(tight), SimulatedWorker(tight)
    for name in ("a", "b", "c"):
        add(core, name, prompt_len=4, max_tokens=14)
    texts: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    while core.sequences:
        result, arrays = worker.step(core.plan("w"))
        for each in core.absorb("w", result, arrays):
            texts[each.sequence.request].append(int(arrays.ids[each.index]))
    assert core.planner.preemption.num > 0
    assert texts["a"] == texts["b"] == texts["c"], "equal prompts write equal texts"
    assert len(texts["a"]) == 14


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(63, 1), (1, 63), (1, None), (63, None)])
def test_a_request_that_fits_exactly_is_accepted_and_ends(prompt_len: int, max_tokens: int | None):
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "r", prompt_len, max_tokens)
    num_tokens = 0
    while core.sequences:
        num_tokens += len(core.absorb("w", *worker.step(core.plan("w"))))
    assert num_tokens == (max_tokens or 64 - prompt_len)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(64, None), (64, 1), (60, 5)])
def test_a_request_without_room_is_refused_with_both_numbers(
    prompt_len: int, max_tokens: int | None
):
    with pytest.raises(InvalidRequest, match=rf"64 tokens.*prompt has {prompt_len}"):
        add(scheduler(), "r", prompt_len, max_tokens)


def test_a_replay_that_fits_no_worker_yet_is_told_to_try_again():
    core, prompt = scheduler(Capacity(8, 4, 4, 8, 64)), [0] * 40
    params = SamplingParams(seed=0, max_tokens=20)
    with pytest.raises(InvalidRequest, match="8"):
        add_one(core, "r", prompt, params, attempt=1)
    with pytest.raises(Unavailable, match="8") as refused:
        add_one(core, "r", prompt, params, attempt=2)
    assert refused.value.status == 503
    core.add_worker("v", CAPACITY)
    add_one(core, "r", prompt, params, attempt=3)


def test_a_replay_that_fits_no_context_is_told_so_for_all_workers_have_the_same():
    core, params = scheduler(), SamplingParams(seed=0, max_tokens=20)
    for attempt in (1, 2):
        with pytest.raises(InvalidRequest, match="context holds 64") as refused:
            add_one(core, "r", [0] * 60, params, attempt=attempt)
        assert refused.value.code == "context_length_exceeded"


def test_why_a_sequence_ended_is_told_with_where_it_was():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    reasons = {}

    def note() -> None:
        for ended in core.take_ended():
            reasons[ended.sequence.request] = (ended.reason, ended.sequence.last_worker_id)

    add(core, "whole", max_tokens=1)
    add(core, "left")
    add(core, "left as it ended", max_tokens=1)
    planned = core.plan("w")
    core.cancel(("left", 1))
    core.cancel(("left as it ended", 1))
    core.absorb("w", *worker.step(planned))
    add(core, "left in line")
    core.cancel(("left in line", 1))
    add(core, "poison")
    for worker_id in ("w", "v"):
        core.plan(worker_id)
        core.remove_worker(worker_id, 0)
        core.add_worker("v", CAPACITY)
    core.remove_worker("v", 0)
    core.add_worker("v", CAPACITY)
    add(core, "too late")
    core.remove_worker("v", 0)
    core.fail_unservable(0, lambda _: Unavailable("nobody came", code="no_worker"))
    note()
    assert reasons == {
        "whole": ("length", "w"),
        "left": ("cancelled", "w"),
        "left as it ended": ("cancelled", "w"),
        "left in line": ("cancelled", None),
        "poison": ("worker_died", "v"),
        "too late": ("no_worker", None),
    }
    assert core.take_ended() == []


def test_a_row_that_is_wrong_ends_its_sequence_as_an_error():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "odd")
    result, arrays = worker.step(core.plan("w"))
    row = msgspec.structs.replace(result.rows[0], run=NO_TOKENS, error="not finite")
    core.absorb("w", StepResult(result.step, [row]), TokenArrays(arrays.ids[:0]))
    (ended,) = core.take_ended()
    assert ended.reason == "internal_error"


def test_a_row_that_is_wrong_in_the_middle_of_its_prompt_ends_its_sequence_too():
    core = scheduler()
    add(core, "odd", prompt_len=20)
    planned = core.plan("w")
    row = ResultRow(planned.plan.admit[0].slot, "odd", 1, TokenRun(0), error="not finite")
    core.absorb("w", StepResult(planned.plan.step, [row]), TokenArrays())
    (ended,) = core.take_ended()
    assert ended.reason == "internal_error"


def test_a_sequence_counts_how_often_it_made_way():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for name in ("a", "b"):
        add(core, name, prompt_len=4, max_tokens=50)
    while core.sequences:
        step(core, worker)
    nums = [each.sequence.num_preemptions for each in core.take_ended()]
    assert sum(nums) == core.planner.preemption.num > 0


def test_a_long_context_in_few_blocks_and_many_blocks_of_short_context_are_both_of_use():
    long = Capacity(16, 4, 4, 8, max_model_len=64)
    short = Capacity(64, 4, 4, 8, max_model_len=16)
    core = scheduler(long)
    add(core, "long", prompt_len=30)
    core.add_worker("v", short)
    add(core, "another", prompt_len=30)
    add(core, "small")
    core.plan("v")
    assert computed(core, "v") == {"small"}, "an unrunnable sequence delays no other"
    core.plan("w")
    assert "long" in computed(core, "w")


def test_with_two_plans_in_flight_a_text_and_its_end_are_as_with_one():
    texts: dict[int, Any] = {}
    outputs: list[Any]
    for depth in (1, 2):
        core = Scheduler(max_waiting=10, priority_step_s=10, pipeline_depth=depth)
        core.add_worker("w", CAPACITY)
        worker = SimulatedWorker(CAPACITY)
        add(core, "a", prompt_len=10, max_tokens=6)
        add(core, "b", max_tokens=3)
        texts[depth], outputs, most = {"a": [], "b": []}, [], 0
        while core.sequences or outputs:
            while planned := core.plan("w"):
                outputs.append(worker.step(planned))
            most = max(most, len(outputs))
            if outputs:
                result, arrays = outputs.pop(0)
                for emission in core.absorb("w", result, arrays):
                    start = sum(row.run.num_tokens for row in result.rows[: emission.index])
                    texts[depth][emission.sequence.request].append(int(arrays.ids[start]))
        assert most == depth
        assert core.workers["w"].pool.num_free == CAPACITY.num_blocks
    assert texts[1] == texts[2]
    assert [len(text) for text in texts[1].values()] == [6, 3]


def test_a_plan_that_only_admits_is_not_empty():
    core = scheduler()
    add(core, "r")
    worker, sequence = core.workers["w"], core.sequences["r", 1]
    builder = worker.begin_plan()
    assert builder.is_empty
    worker.allocate(sequence)
    builder.admit(sequence)
    assert not builder.is_empty


def test_nothing_of_a_seat_is_left_with_a_sequence_that_lost_its_worker():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "r")
    step(core, worker)
    core.remove_worker("w", 0)
    sequence = core.sequences["r", 1]
    assert sequence.allocation is None
    assert (sequence.num_computed, sequence.num_to_compute) == (0, 4)


def steps_of_the_good_worker(deaths_every: int | None) -> tuple[int, int]:
    """Its steps for twelve requests, and the deaths of a second worker, which dies in each of its
    first steps."""
    core, worker, num_steps, num_deaths = scheduler(), SimulatedWorker(CAPACITY), 0, 0
    add(core, "first", max_tokens=PROBATION_STEPS)
    while core.sequences:
        step(core, worker)
    for number in range(10):
        add(core, str(number), max_tokens=10)
    while core.sequences:
        if deaths_every and num_steps % deaths_every == 0:
            core.add_worker("bad", CAPACITY)
            while core.plan("bad"):
                num_deaths += 1
            assert core.remove_worker("bad", 0) == [], "nobody fails"
        step(core, worker)
        num_steps += 1
    return num_steps, num_deaths


def test_a_worker_that_dies_in_its_first_step_for_ever_costs_the_others_a_step_each_time():
    alone, _ = steps_of_the_good_worker(None)
    num_steps, num_deaths = steps_of_the_good_worker(3)
    assert num_deaths > 5
    assert num_steps <= alone + 2 * num_deaths


def test_without_a_proven_worker_all_workers_get_sequences():
    core = scheduler()
    core.add_worker("v", CAPACITY)
    for number in range(6):
        add(core, str(number))
    core.plan("w")
    core.plan("v")
    assert [len(worker.running) for worker in core.workers.values()] == [3, 3]
    core.remove_worker("v", 0)
    core.remove_worker("w", 0)
    core.add_worker("w", CAPACITY)
    assert core.plan("w"), "a suspect runs, for there is nobody else to run it"


def test_a_suspect_does_not_wait_for_a_proven_worker_that_is_not_ready():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "first", max_tokens=PROBATION_STEPS + 10)
    for _ in range(PROBATION_STEPS):
        step(core, worker)
    core.add_worker("dies", CAPACITY)
    add(core, "suspect")
    assert core.plan("dies")
    assert core.plan("w"), "it hangs"
    assert not core.remove_worker("dies", 0)
    core.add_worker("new", CAPACITY)
    assert core.plan("new") is None
    core.note_state("w", is_ready=False)
    assert core.plan("new")


def test_a_worker_that_has_finished_its_first_steps_gets_as_much_as_the_others():
    core, workers = scheduler(), {"w": SimulatedWorker(CAPACITY), "v": SimulatedWorker(CAPACITY)}
    add(core, "first", max_tokens=PROBATION_STEPS)
    while core.sequences:
        step(core, workers["w"])
    core.add_worker("v", CAPACITY)
    for number in range(8):
        add(core, str(number), max_tokens=40)
    most = []
    for _ in range(PROBATION_STEPS + 1):
        planned = core.plan("v")
        most.append(len(core.workers["v"].running))
        core.absorb("v", *workers["v"].step(planned))
        step(core, workers["w"])
    assert most == [1] * PROBATION_STEPS + [3]


def test_the_choices_of_a_prompt_share_its_ids_and_only_the_first_brings_their_logprobs():
    core, prompt = scheduler(), np.arange(3, dtype=np.int32)
    asking = SamplingParams(seed=0, max_tokens=5, prompt_logprobs=3, logprobs=2)
    choices = [NewSequence("r/0", 0, 2), NewSequence("r/1", 1), NewSequence("r/2", 2, 1)]
    generate, emitted = Generate("r", 1, asking, choices), np.array([7, 8, 9], np.int32)
    core.add(Arrival(generate, prompt, emitted, 0, 0.0))
    first, *others = (core.sequences[each.request, 1] for each in choices)
    assert first.params is asking
    assert [each.params.prompt_logprobs for each in others] == [None, None]
    assert all(each.prompt is prompt for each in (first, *others))
    assert [each.emitted for each in (first, *others)] == [[7, 8], [], [9]]


def test_of_the_choices_of_a_prompt_all_are_taken_or_none():
    core, prompt = scheduler(), np.arange(3, dtype=np.int32)
    choices = [NewSequence(f"r/{number}", number) for number in range(15)]
    params = SamplingParams(seed=0, max_tokens=5)
    with pytest.raises(Overloaded, match="15 sequences would wait for 4 free slots"):
        core.add(Arrival(Generate("r", 1, params, choices), prompt, prompt[:0], 0, 0.0))
    assert not core.sequences
    core.add(Arrival(Generate("r", 1, params, choices[:14]), prompt, prompt[:0], 0, 0.0))
    assert len(core.sequences) == 14


def test_a_worker_gets_the_options_as_they_came():
    core, prompt = scheduler(), np.arange(3, dtype=np.int32)
    row = msgspec.Raw(
        msgspec.msgpack.encode([3, "salt", "ann", True, 1, "", None, "", 0, {"of": "later"}])
    )
    params = SamplingParams(seed=0, max_tokens=5)
    generate = Generate("r", 1, params, [NewSequence("r/0")], options=row)
    core.add(Arrival(generate, prompt, prompt[:0], 0, 0.0))
    (sequence,) = core.sequences.values()
    assert (sequence.options.owner, sequence.num_worker_deaths) == ("ann", 1)
    assert sequence.is_isolated, "a worker died in another cell"
    planned = core.plan("w")
    assert planned is not None
    (admit,) = planned.plan.admit
    assert bytes(admit.options) == bytes(row)
