"""Prefix hits of sequences, and the choice of a worker for them."""

import msgspec
import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.placement import SEQUENCE_TOKENS
from services.scheduler.results import Emission
from services.scheduler.scheduler import Scheduler
from shared.wire.messages import Admit, Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
                    max_model_len=64)  # fmt: skip
LARGE = Capacity(256, 4, 32, 1024, 1024)
PROMPT = list(range(10))


def scheduler(capacity: Capacity = CAPACITY, caches_prefixes: bool = True) -> Scheduler:
    core = Scheduler(100, 10, caches_prefixes)
    core.add_worker("w", capacity)
    return core


def add(core: Scheduler, name: str, prompt: list[int], max_tokens: int = 1, salt: str = "") -> None:
    params = SamplingParams(seed=0, max_tokens=max_tokens)
    add_one(core, name, prompt, params, salt=salt)


def step(core: Scheduler, worker: SimulatedWorker, worker_id: str = "w") -> list[Emission]:
    return core.absorb(worker_id, *worker.step(core.plan(worker_id)))


def admits(core: Scheduler, worker: SimulatedWorker, worker_id: str = "w") -> list[Admit]:
    """The sequences the next step admits."""
    planned = core.plan(worker_id)
    core.absorb(worker_id, *worker.step(planned))
    return planned.plan.admit


def finish(core: Scheduler, worker: SimulatedWorker) -> list[tuple[str, int]]:
    """Finishes every sequence; returns each one's cached tokens."""
    while core.sequences:
        step(core, worker)
    return [(each.sequence.request, each.sequence.num_cached) for each in core.take_ended()]


@pytest.mark.parametrize(
    ("prompt", "num_cached"),
    [
        (PROMPT, 8),
        (PROMPT[:9], 8),
        (PROMPT[:8], 4),  # the logits of its last id are needed
        (PROMPT[:4], 0),
        ([*PROMPT[:5], 77, 78, 79, 80], 4),
        ([77, *PROMPT[1:]], 0),
        (PROMPT[4:], 0),
    ],
)
def test_the_full_blocks_that_a_prompt_begins_with_are_not_computed_again(
    prompt: list[int], num_cached: int
):
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "first", PROMPT)
    finish(core, worker)
    add(core, "second", prompt)
    planned = core.plan("w")
    assert planned.plan.admit[0].num_cached == num_cached
    num_planned = sum(row.num_tokens for row in planned.plan.prefill) + len(planned.plan.decode)
    assert num_planned == len(prompt) - num_cached
    assert core.num_prefix_queries == 10 + len(prompt)
    assert core.num_prefix_hits == num_cached


def test_the_next_turn_finds_the_output_of_the_last_one():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "first", PROMPT, max_tokens=9)
    texts = []
    while core.sequences:
        texts += [each.sequence.emitted for each in step(core, worker)]
    add(core, "second", [*PROMPT, *texts[-1], 5, 6])
    assert admits(core, worker)[0].num_cached == 16, "the last token that was written has no KV"


def test_others_with_the_same_prompt_share_its_blocks_while_it_runs():
    tight = Capacity(10, 4, 4, 64, 64)
    core, worker = scheduler(tight), SimulatedWorker(tight)
    prompt = list(range(25))
    add(core, "first", prompt, max_tokens=3)
    step(core, worker)
    add(core, "second", prompt, max_tokens=3)
    add(core, "third", prompt, max_tokens=3)
    assert [each.num_cached for each in admits(core, worker)] == [24, 24], "7 + 1 + 1 blocks"
    finish(core, worker)
    assert core.planner.preemption.num == 0


def test_a_salt_is_a_cache_of_its_own():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for name, salt in (("a", ""), ("b", "x"), ("c", "y"), ("d", "x")):
        add(core, name, PROMPT, salt=salt)
        while core.sequences:
            step(core, worker)
    assert finish(core, worker) == [("a", 0), ("b", 0), ("c", 0), ("d", 8)]


def test_without_caching_everything_is_computed():
    core, worker = scheduler(caches_prefixes=False), SimulatedWorker(CAPACITY)
    add(core, "r/0", PROMPT[:5])
    add(core, "r/1", PROMPT[:3])
    assert len(admits(core, worker)) == 2, "no choice waits for another"
    add(core, "again", PROMPT[:5])
    assert admits(core, worker)[0].num_cached == 0


def test_a_reset_makes_the_next_one_compute_all():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "first", PROMPT)
    finish(core, worker)
    core.reset_prefix_cache()
    add(core, "second", PROMPT)
    assert admits(core, worker)[0].num_cached == 0


def test_another_worker_knows_nothing_of_the_first_ones_blocks():
    core = scheduler()
    add(core, "first", PROMPT)
    finish(core, SimulatedWorker(CAPACITY))
    core.remove_worker("w", 0)
    core.add_worker("w", CAPACITY)
    add(core, "second", PROMPT)
    assert admits(core, SimulatedWorker(CAPACITY))[0].num_cached == 0


def test_a_preempted_sequence_finds_its_remaining_blocks_and_counts_no_hit():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "r", PROMPT, max_tokens=9)
    for _ in range(4):
        step(core, worker)
    core.planner.preemption.preempt(core.workers["w"])
    (admit,) = admits(core, worker)
    assert (admit.num_ids, admit.num_cached) == (14, 12)
    assert finish(core, worker) == [("r", 0)]
    assert core.num_prefix_hits == 0


# --- the usage ------------------------------------------------------------------------------------


def core_with_a_hit(max_tokens: int = 3) -> tuple[Scheduler, SimulatedWorker]:
    """A core; its worker w has cached the first 96 ids of a just added prompt of 100."""
    core, worker = scheduler(LARGE), SimulatedWorker(LARGE)
    add(core, "first", list(range(100)))
    finish(core, worker)
    add(core, "r", list(range(100)), max_tokens)
    return core, worker


def test_the_hit_of_a_worker_that_is_lost_before_its_first_step_counts_for_nothing():
    core, _ = core_with_a_hit()
    core.plan("w")
    assert core.sequences["r", 1].num_cached == 96
    core.remove_worker("w", 0)
    core.add_worker("v", LARGE)
    other = SimulatedWorker(LARGE)
    assert admits(core, other, "v")[0].num_cached == 0
    while core.sequences:
        step(core, other, "v")
    assert [each.sequence.num_cached for each in core.take_ended()] == [0]


def test_the_cache_of_the_next_worker_counts():
    core, other = two_workers(100)
    core.workers["w"].admits = False
    add(core, "second", list(range(50)))
    while ("second", 1) in core.sequences:
        step(core, other, "v")
    core.workers["w"].admits = True
    add(core, "r", list(range(100)), max_tokens=3)
    core.plan("w")
    assert core.sequences["r", 1].num_cached == 96
    core.remove_worker("w", 0)
    assert admits(core, other, "v")[0].num_cached == 48
    assert core.sequences["r", 1].num_cached == 48


def test_a_loss_after_the_first_token_changes_nothing():
    core, worker = core_with_a_hit()
    step(core, worker)
    assert len(core.sequences["r", 1].emitted) == 1
    core.remove_worker("w", 0)
    core.add_worker("v", LARGE)
    assert admits(core, SimulatedWorker(LARGE), "v")[0].num_cached == 0
    assert core.sequences["r", 1].num_cached == 96


def preempted_in_its_prompt(core: Scheduler, worker: SimulatedWorker) -> None:
    """A step computes a part of the running prompt, which is then preempted."""
    step(core, worker)
    core.planner.preemption.preempt(core.workers["w"])


def test_own_work_that_a_preempted_prompt_finds_again_is_no_hit():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "r", list(range(30)), max_tokens=3)
    preempted_in_its_prompt(core, worker)
    assert admits(core, worker)[0].num_cached == 16
    assert finish(core, worker) == [("r", 0)]


def test_blocks_lost_in_a_preemption_are_no_hits():
    small = msgspec.structs.replace(LARGE, max_num_batched_tokens=2)
    core, worker = scheduler(small), SimulatedWorker(small)
    add(core, "first", list(range(100)))
    finish(core, worker)
    add(core, "r", list(range(100)), max_tokens=3)
    preempted_in_its_prompt(core, worker)
    assert core.sequences["r", 1].num_cached == 96
    core.reset_prefix_cache()
    assert admits(core, worker)[0].num_cached == 0
    assert core.sequences["r", 1].num_cached == 0


@pytest.mark.parametrize("has_ended", [False, True])
def test_blocks_of_an_earlier_attempt_are_no_hits_of_a_replay(has_ended: bool):
    """Its tokenizer is lost, with the end of the output or before it."""
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "r", PROMPT, max_tokens=3)
    step(core, worker)
    if has_ended:
        finish(core, worker)
    core.cancel_route(0)
    add_one(core, "r", PROMPT, SamplingParams(seed=0, max_tokens=3), attempt=2)
    assert admits(core, worker)[0].num_cached == 8
    assert finish(core, worker)[-1] == ("r", 0)


def test_blocks_of_other_requests_are_hits_of_a_replay_in_another_cell():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "first", PROMPT)
    finish(core, worker)
    add_one(core, "r", PROMPT, SamplingParams(seed=0, max_tokens=3), attempt=2)
    assert finish(core, worker) == [("r", 8)]


# --------------------------------------------------------------------------------------------------


def test_blocks_of_a_sequence_that_failed_are_not_used_again():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    add(core, "first", PROMPT[:6])
    result, arrays = worker.step(core.plan("w"))
    rows = [msgspec.structs.replace(result.rows[0], finish=None, error="not finite")]
    core.absorb("w", msgspec.structs.replace(result, rows=rows), arrays)
    add(core, "second", PROMPT[:6])
    assert admits(core, worker)[0].num_cached == 0
    assert core.workers["w"].pool.num_free == CAPACITY.num_blocks


# --- choices of one prompt ------------------------------------------------------------------------


def test_choices_wait_for_the_first_ones_prompt_and_then_find_it():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for choice in range(3):
        add(core, f"r/0/{choice}", PROMPT, max_tokens=3)
    add(core, "other/0/0", [50, 51])
    steps = [[each.request for each in admits(core, worker)] for _ in range(2)]
    assert steps == [["r/0/0", "other/0/0"], ["r/0/1", "r/0/2"]], "nobody else waits"
    cached = dict(finish(core, worker))
    assert (cached["r/0/0"], cached["r/0/1"], cached["r/0/2"]) == (0, 8, 8)


@pytest.mark.parametrize("loss", ["cancel", "stall", "preempt", "suspect"])
def test_no_choice_waits_for_one_that_is_gone(loss: str):
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for choice in range(2):
        add(core, f"r/0/{choice}", list(range(30)), max_tokens=3)
    step(core, worker)
    first = core.sequences["r/0/0", 1]
    match loss:
        case "cancel":
            core.cancel(first.key)
        case "stall":
            first.max_emitted = 0
        case "preempt":
            core.planner.preemption.preempt(core.workers["w"])
            first.max_emitted = 0
            core.queues.waiting.try_remove(first)
            core.queues.paused.add(first)
        case "suspect":
            first.is_isolated = True
            core.workers["w"].ran_isolated = True
    (admit,) = admits(core, worker)
    assert (admit.request, admit.num_cached) == ("r/0/1", 16)


def test_choices_without_a_reader_give_back_the_blocks_they_share():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for choice in range(2):
        add(core, f"r/0/{choice}", list(range(24)), max_tokens=16)
        core.sequences[f"r/0/{choice}", 1].max_emitted = 1
    for _ in range(3):
        step(core, worker)
    assert len(core.workers["w"].running) == 2
    add(core, "large", list(range(100, 148)), max_tokens=1)
    assert [each.request for each in admits(core, worker)] == ["large"]
    assert len(core.queues.paused) == 2


def test_choices_of_a_prompt_that_fills_no_block_start_together():
    core, worker = scheduler(), SimulatedWorker(CAPACITY)
    for choice in range(3):
        add(core, f"r/0/{choice}", [1, 2])
    assert len(admits(core, worker)) == 3


# --- several workers ------------------------------------------------------------------------------


def two_workers(num_ids: int) -> tuple[Scheduler, SimulatedWorker]:
    """A core with w, which has cached a prompt of ``num_ids``, and v, which is returned."""
    core, first = scheduler(LARGE), SimulatedWorker(LARGE)
    add(core, "first", list(range(num_ids)))
    finish(core, first)
    step(core, first)
    core.add_worker("v", LARGE)
    return core, SimulatedWorker(LARGE)


def test_a_sequence_goes_where_its_beginning_is():
    core, _ = two_workers(100)
    add(core, "second", list(range(100)))
    assert core.plan("v") is None
    assert core.plan("w").plan.admit[0].num_cached == 96


@pytest.mark.parametrize(("num_busy", "is_passed_over"), [(1, False), (2, True)])
def test_cached_tokens_are_weighed_against_load(num_busy: int, is_passed_over: bool):
    core, _ = two_workers(2 * SEQUENCE_TOKENS)
    core.workers["v"].admits = False
    for number in range(num_busy):
        add(core, f"busy {number}", [200 + number, 1], max_tokens=50)
    core.plan("w")
    core.workers["v"].admits = True
    add(core, "second", list(range(2 * SEQUENCE_TOKENS)))
    assert (core.plan("v") is not None) == is_passed_over


def test_a_full_worker_is_not_waited_for():
    core, _ = two_workers(100)
    core.workers["w"].admits = False
    add(core, "second", list(range(100)))
    assert core.plan("v").plan.admit[0].num_cached == 0


def test_a_block_that_the_end_of_a_text_leaves_uncomputed_is_not_shared():
    """The next plan would compute its last id, but its worker skips ended sequences."""
    core, worker = Scheduler(100, 10, pipeline_depth=2), SimulatedWorker(CAPACITY)
    core.add_worker("w", CAPACITY)
    params = SamplingParams(seed=0, max_tokens=9, prompt_logprobs=0)
    add_one(core, "r", PROMPT[:7], params)
    result, arrays = worker.step(core.plan("w"))
    assert core.plan("w").plan.decode
    told, drawn = result.rows
    rows = [told, msgspec.structs.replace(drawn, finish="stop")]
    core.absorb("w", msgspec.structs.replace(result, rows=rows), arrays)
    assert len(core.workers["w"].index) == 1
