"""Groups of layers with windows: blocks given back, keep points, hits."""

import msgspec
import pytest

from services.scheduler.limits import LacksBlocks
from services.scheduler.scheduler import Scheduler
from services.scheduler.worker_state import WorkerState
from shared.wire.kv_groups import READ_AT_ONCE, most_blocks, num_passed
from shared.wire.messages import NO_TOKENS, Capacity, Drop, Group
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker
from tests.services.scheduler.test_prefix_cache import add as add_unread
from tests.services.scheduler.test_prefix_cache import admits, finish, step

SIZE, WINDOW = 16, 64
BOTH = Capacity(num_blocks=400, block_size=SIZE, max_num_seqs=8, max_num_batched_tokens=128,
                max_model_len=8192, groups=(Group(), Group(WINDOW)))  # fmt: skip
WINDOWED = msgspec.structs.replace(BOTH, groups=(Group(WINDOW),))
PROMPT = list(range(1000))


def scheduler(
    capacity: Capacity, caches_prefixes: bool = True
) -> tuple[Scheduler, SimulatedWorker]:
    core = Scheduler(100, 10, caches_prefixes)
    core.add_worker("w", capacity)
    return core, SimulatedWorker(capacity)


def add(core: Scheduler, name: str, prompt: list[int], max_tokens: int = 1) -> None:
    """A request of a client that reads everything."""
    add_unread(core, name, prompt, max_tokens)
    sequence = core.sequences[name, 1]
    sequence.max_emitted, sequence.max_bytes = 1 << 20, 1 << 30


def worker_of(core: Scheduler) -> WorkerState:
    return core.workers["w"]


def num_held(core: Scheduler, name: str) -> list[int]:
    tables = core.sequences[name, 1].allocated.tables
    return [len(each.blocks) for each in tables]


def kept(core: Scheduler) -> list[int]:
    """The tokens in front of each keep point."""
    points = worker_of(core).pool.keep_points.values()
    return sorted(each.num_blocks * SIZE for each in points)


def test_no_block_is_behind_a_window_until_attention_reads_none_of_its_keys():
    assert num_passed(Group(), 10_000, SIZE) == 0
    assert num_passed(Group(WINDOW), WINDOW + READ_AT_ONCE - 1, SIZE) == 0
    assert num_passed(Group(WINDOW), WINDOW + READ_AT_ONCE, SIZE) == READ_AT_ONCE // SIZE
    assert num_passed(Group(WINDOW), WINDOW + READ_AT_ONCE, block_size=48) == 1


@pytest.mark.parametrize("caches_prefixes", [True, False])
def test_a_window_keeps_few_blocks_however_long_the_text_is(caches_prefixes: bool):
    core, worker = scheduler(BOTH, caches_prefixes)
    add(core, "r", PROMPT, max_tokens=500)
    drops: list[Drop] = []
    for _ in range(300):
        planned = core.plan("w")
        assert planned is not None
        drops += planned.plan.drops
        core.absorb("w", *worker.step(planned))
        whole, windowed = num_held(core, "r")
        assert whole >= len(PROMPT) // SIZE
        assert windowed <= most_blocks(WINDOWED, 8192)
    assert windowed <= (WINDOW + READ_AT_ONCE) // SIZE + 2
    assert drops[-1] == Drop(slot=0, group=1, num_blocks=drops[-1].num_blocks)
    assert worker.slots[0].tables[1].count(BOTH.num_blocks) == drops[-1].num_blocks > 60
    finish(core, worker)
    assert worker_of(core).pool.num_free == BOTH.num_blocks


def test_a_prompt_of_a_hundred_windows_needs_no_more_than_a_window_and_a_chunk():
    num_blocks = most_blocks(WINDOWED, 6500)
    assert num_blocks < 30
    core, worker = scheduler(msgspec.structs.replace(WINDOWED, num_blocks=num_blocks))
    add(core, "r", [each % 97 for each in range(6400)], max_tokens=100)
    assert finish(core, worker) == [("r", 0)]
    with pytest.raises(LacksBlocks, match=r"200 tokens .* need 13 KV blocks .* has 12"):
        add(scheduler(msgspec.structs.replace(WINDOWED, num_blocks=12))[0], "r", [1] * 200, 0)


@pytest.mark.parametrize("capacity", [BOTH, WINDOWED])
def test_the_same_prompt_and_the_next_turn_begin_at_keep_points(capacity: Capacity):
    core, worker = scheduler(capacity)
    add(core, "first", PROMPT, max_tokens=100)
    text = core.sequences["first", 1].emitted
    finish(core, worker)
    assert kept(core) == [992, 1088], "the end of the prompt and of the answer"
    add(core, "again", PROMPT)
    assert admits(core, worker)[0].num_cached == 992
    finish(core, worker)
    add(core, "turn", [*PROMPT, *text, *range(50)])
    assert admits(core, worker)[0].num_cached == 1088


def test_a_prompt_that_leaves_another_one_keeps_the_junction_for_the_next():
    core, worker = scheduler(BOTH)
    numbers = []
    for last in (1, 2, 3):
        add(core, f"r{last}", [*PROMPT[:500], *[last] * 300])
        numbers += [each.num_cached for each in admits(core, worker)]
        finish(core, worker)
    assert numbers == [0, 0, 496]
    assert core.num_prefix_cut == 496, "of the second one"


def test_an_answer_keeps_a_point_every_few_thousand_tokens():
    core, worker = scheduler(BOTH)
    add(core, "r", PROMPT, max_tokens=5000)
    finish(core, worker)
    assert kept(core) == [992, 992 + 2048, 992 + 4096, 5984]


def test_a_preempted_sequence_goes_on_at_its_last_full_block():
    core, worker = scheduler(BOTH)
    add(core, "r", PROMPT, max_tokens=100)
    for _ in range(40):
        step(core, worker)
    core.planner.preemption.preempt(worker_of(core))
    (admit,) = admits(core, worker)
    assert admit.num_ids - admit.num_cached <= SIZE
    assert finish(core, worker) == [("r", 0)]


def test_of_a_sequence_with_bad_numbers_nothing_stays():
    core, worker = scheduler(BOTH)
    add(core, "r", PROMPT, max_tokens=100)
    for _ in range(20):
        step(core, worker)
    planned = core.plan("w")
    assert planned is not None
    result, _ = worker.step(planned)
    failed = msgspec.structs.replace(result.rows[0], error="NaN", run=NO_TOKENS)
    core.absorb("w", msgspec.structs.replace(result, rows=[failed]), TokenArrays())
    assert not kept(core)
    assert not len(worker_of(core).index)
    assert worker_of(core).pool.num_free == BOTH.num_blocks


def test_a_reset_forgets_keep_points():
    core, worker = scheduler(BOTH)
    add(core, "r", PROMPT)
    finish(core, worker)
    core.reset_prefix_cache()
    add(core, "again", PROMPT)
    assert admits(core, worker)[0].num_cached == 0


def test_the_end_of_a_chat_goes_before_its_beginning_and_a_keep_point_goes_whole():
    core, worker = scheduler(BOTH)
    add(core, "r", PROMPT, max_tokens=400)
    finish(core, worker)
    assert kept(core) == [992, 1392]
    pool = worker_of(core).pool
    hits, held = [], 0
    while pool.num_free:
        pool.try_allocate(1)
        held += 1
        add(core, "again", [*PROMPT, *range(400)])
        hits.append(worker_of(core).num_cached(core.sequences["again", 1]))
        core.cancel(("again", 1))
    assert sorted(hits, reverse=True) == hits
    assert set(hits) == {992, 0}
    assert held == BOTH.num_blocks
    assert not pool.keep_points


def test_a_step_that_runs_ahead_reads_no_block_that_was_given_away():
    core, worker = Scheduler(100, 10, pipeline_depth=2), SimulatedWorker(BOTH)
    core.add_worker("w", BOTH)
    for number in range(6):
        add(core, f"r{number}", [number, *PROMPT], max_tokens=50)
    flying: list = []
    while core.sequences:
        planned = core.plan("w")
        if planned is not None:
            flying.append(planned)
        if planned is None or len(flying) == 2:
            core.absorb("w", *worker.step(flying.pop(0)))
    assert worker_of(core).pool.num_free == BOTH.num_blocks
