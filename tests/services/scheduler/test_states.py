"""Layers with a state: copies at keep points, hits that begin from them."""

import msgspec
import pytest

from services.scheduler.scheduler import Scheduler
from services.scheduler.worker_state import WorkerState
from shared.wire.messages import NO_TOKENS, Capacity, Group, Keep
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker
from tests.services.scheduler.test_prefix_cache import admits, finish, step
from tests.services.scheduler.test_registration import why_refused
from tests.services.scheduler.test_registration import worker as registering
from tests.services.scheduler.test_windows import add, kept

SIZE = 16
CAPACITY = Capacity(num_blocks=2000, block_size=SIZE, max_num_seqs=8, max_num_batched_tokens=128,
                    max_model_len=30_000, num_states=16)  # fmt: skip
PROMPT = list(range(1000))


def meet(depth: int = 1, **changes: object) -> tuple[Scheduler, SimulatedWorker]:
    capacity = msgspec.structs.replace(CAPACITY, **changes)
    core = Scheduler(100, 10, pipeline_depth=depth)
    core.add_worker("w", capacity)
    return core, SimulatedWorker(capacity)


def worker_of(core: Scheduler) -> WorkerState:
    return core.workers["w"]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_same_prompt_and_the_next_turn_begin_at_copies(num_drafts: int):
    core, worker = meet(num_speculative_tokens=num_drafts)
    add(core, "first", PROMPT, max_tokens=100)
    text = core.sequences["first", 1].emitted
    finish(core, worker)
    assert kept(core) == [960, 1088], "multiples of 64 in the prompt and in the answer"
    add(core, "again", PROMPT)
    assert [each.num_cached for each in admits(core, worker)] == [960]
    finish(core, worker)
    add(core, "turn", [*PROMPT, *text, *range(50)])
    assert [each.num_cached for each in admits(core, worker)] == [1088]


def test_a_chunk_ends_where_the_copy_of_its_prompt_would_be_overwritten():
    core, worker = meet()
    add(core, "r", PROMPT[:256])
    sizes, keeps = [], []
    while core.sequences:
        planned = core.plan("w")
        sizes += [row.num_tokens for row in planned.plan.prefill]
        keeps += planned.plan.keeps
        core.absorb("w", *worker.step(planned))
    assert sizes == [128, 64, 64]
    assert keeps == [Keep(0, 1)]
    assert kept(core) == [192, 256]


def test_a_prompt_that_leaves_another_one_keeps_the_junction_for_the_next():
    core, worker = meet()
    numbers = []
    for last in (1, 2, 3):
        add(core, f"r{last}", [*PROMPT[:500], *[last] * 300])
        numbers += [each.num_cached for each in admits(core, worker)]
        finish(core, worker)
    assert numbers == [0, 0, 448]
    assert core.num_prefix_cut == 448, "of the second one"


def test_choices_begin_at_the_copy_of_their_prompt():
    core, worker = meet()
    for choice in range(4):
        add(core, f"r/{choice}", PROMPT, max_tokens=5)
    numbers = []
    while core.sequences:
        planned = core.plan("w")
        numbers += [each.num_cached for each in planned.plan.admit]
        core.absorb("w", *worker.step(planned))
    assert numbers == [0, 960, 960, 960]


def test_a_preempted_sequence_goes_on_at_its_last_copy():
    core, worker = meet()
    add(core, "r", PROMPT, max_tokens=100)
    for _ in range(60):
        step(core, worker)
    core.planner.preemption.preempt(worker_of(core))
    (admit,) = admits(core, worker)
    assert admit.num_ids - admit.num_cached <= 64
    assert finish(core, worker) == [("r", 0)]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("num_steps", [1, 8])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_keeps_a_copy_every_few_thousand_tokens(
    depth: int, num_steps: int, num_drafts: int
):
    core, worker = meet(depth, num_speculative_tokens=num_drafts, max_num_steps=num_steps)
    worker.is_fast = num_steps > 1
    add(core, "r", PROMPT, max_tokens=5000)
    flying: list = []
    while core.sequences:
        planned = core.plan("w")
        flying += [planned] if planned is not None else []
        if planned is None or len(flying) == depth:
            core.absorb("w", *worker.step(flying.pop(0)))
    assert kept(core) == [960, 960 + 2048, 960 + 4096, 5952]


def test_a_failed_sequence_leaves_no_copy_of_other_ids():
    """Its state has seen the last known id, which the scheduler does not count."""
    core, worker = meet()
    add(core, "r", PROMPT[:200], max_tokens=100)
    while len(core.sequences["r", 1].emitted) < 56:
        step(core, worker)
    planned = core.plan("w")
    assert planned is not None
    result, _ = worker.step(planned)
    failed = msgspec.structs.replace(
        result.rows[0], error="nothing is allowed", code="no_token_allowed", run=NO_TOKENS
    )
    core.absorb("w", msgspec.structs.replace(result, rows=[failed]), TokenArrays())
    assert kept(core) == [192]
    assert worker_of(core).pool.num_free_states == CAPACITY.num_states - 1


def test_of_a_sequence_with_bad_numbers_nothing_stays():
    core, worker = meet()
    add(core, "r", PROMPT, max_tokens=100)
    for _ in range(20):
        step(core, worker)
    planned = core.plan("w")
    assert planned is not None
    result, _ = worker.step(planned)
    failed = msgspec.structs.replace(result.rows[0], error="NaN", run=NO_TOKENS)
    core.absorb("w", msgspec.structs.replace(result, rows=[failed]), TokenArrays())
    assert not kept(core)
    assert worker_of(core).pool.num_free_states == CAPACITY.num_states


def test_without_room_for_copies_everything_is_computed():
    core, worker = meet(num_states=0)
    for name in ("first", "again"):
        add(core, name, PROMPT, max_tokens=100)
        assert [each.num_cached for each in admits(core, worker)] == [0]
        assert finish(core, worker) == [(name, 0)]


def test_states_and_windows_in_one_model_are_refused():
    with_states = registering(groups=(Group(), Group(64)), num_states=4)
    assert why_refused(with_states, []) == "the capacity has groups with windows and states"


@pytest.mark.slow
@pytest.mark.parametrize(("num_chats", "least"), [(8, 0.95), (4, 0.3)])
def test_agents_find_most_of_their_conversations(num_chats: int, least: float):
    """8 sessions of 33 turns, which grow by some hundred tokens a turn, in a pool for some."""
    turns, num_tokens = 33, 260
    blocks = num_chats * turns * num_tokens // SIZE
    core, worker = meet(num_states=2 * num_chats + 8, num_blocks=blocks)
    chats: list[list[int]] = [[each, *range(300)] for each in range(8)]
    cached = possible = 0
    shares = []
    for turn in range(turns):
        for number, chat in enumerate(chats):
            add(core, f"{turn}/{number}", chat, max_tokens=60)
            sequence = core.sequences[f"{turn}/{number}", 1]
            finish(core, worker)
            if turn:
                cached += sequence.num_cached
                possible += len(chat) - 200
            chats[number] = [*chat, *sequence.emitted, *[turn + number] * 200]
        shares.append(cached / max(1, possible))
    assert shares[-1] >= least
    assert all(share > 0 for share in shares[1:])
