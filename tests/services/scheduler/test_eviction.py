"""The order in which cached units go, and chats in turn that need more room than there is."""

import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.eviction import NUM_IN_TURN, Eviction, Standing
from services.scheduler.scheduler import Scheduler
from shared.wire.messages import EVERY_LAYER, Capacity, Group, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker
from tests.services.scheduler.test_prefix_cache import add, finish

USUAL, MISSED, PASSING = Standing


def name_of(unit: int) -> bytes:
    return bytes([unit])


def evicted(eviction: Eviction[int]) -> list[int]:
    return [eviction.pop() for _ in range(100) if eviction]


def test_the_unit_used_first_goes_first_except_for_passing_ones():
    eviction: Eviction[int] = Eviction(10)
    for unit, standing in ((1, USUAL), (2, PASSING), (3, MISSED), (4, PASSING), (1, USUAL)):
        eviction.put(unit, name_of(unit), standing)
    eviction.discard(4)
    assert evicted(eviction) == [2, 3, 1]


def test_repeated_misses_of_a_prefix_pass_but_for_one_in_a_few():
    eviction: Eviction[int] = Eviction(10)
    standing, standings = USUAL, []
    for _ in range(2 + 2 * NUM_IN_TURN):
        eviction.put(1, name_of(1), standing)
        eviction.pop()
        standing = eviction.standing_of([name_of(1), name_of(2)])
        standings.append(standing)
    assert standings[0] is MISSED
    assert standings[1:].count(MISSED) == 2
    assert standings[1:].count(PASSING) == 2 * NUM_IN_TURN - 1


def test_a_prefix_that_was_found_meanwhile_is_as_any_other():
    eviction: Eviction[int] = Eviction(10)
    eviction.put(1, name_of(1), USUAL)
    eviction.pop()
    assert eviction.standing_of([name_of(1)]) is MISSED
    eviction.put(1, name_of(1), MISSED)
    assert eviction.standing_of([]) is USUAL
    eviction.put(1, name_of(1), USUAL)
    eviction.pop()
    assert eviction.standing_of([name_of(1)]) is MISSED


def test_few_names_are_remembered():
    eviction: Eviction[int] = Eviction(2)
    for unit in (1, 2, 3):
        eviction.put(unit, name_of(unit), USUAL)
    evicted(eviction)
    assert eviction.standing_of([name_of(1)]) is USUAL
    assert eviction.standing_of([name_of(2)]) is MISSED


@pytest.mark.parametrize(
    ("groups", "num_pages"), [(EVERY_LAYER, 1), ((Group(), Group(64)), 2), ((Group(64),), 1)]
)
def test_chats_in_turn_find_some_of_their_text_where_half_of_them_fits(
    groups: tuple[Group, ...], num_pages: int
):
    """Eight chats of five turns; with recency alone none would find anything from some round on."""
    capacity = Capacity(num_blocks=4 * 44 * num_pages, block_size=16, max_num_seqs=4,
                        max_num_batched_tokens=256, max_model_len=2048, groups=groups)  # fmt: skip
    core, worker = Scheduler(100, 10), SimulatedWorker(capacity)
    core.add_worker("w", capacity)
    chats = [[number, *range(400)] for number in range(8)]
    for turn in range(5):
        hits = []
        for number, chat in enumerate(chats):
            add(core, f"{turn}/{number}", chat, max_tokens=16)
            text = core.sequences[f"{turn}/{number}", 1].emitted
            hits += [num for _, num in finish(core, worker)]
            chat += [*text, *[turn] * 32]
        assert turn < 2 or sum(hits) > 400, hits


def test_units_are_kept_for_the_longest_time_asked_for_since_their_last_use():
    eviction: Eviction[int] = Eviction(10, max_retained=10)
    for unit, retention_s in ((1, 5), (2, 0), (3, 60), (4, 0)):
        eviction.put(unit, name_of(unit), PASSING if unit == 4 else USUAL, retention_s)
    eviction.put(3, name_of(3), USUAL)  # of a request without a time
    eviction.pass_time(4)
    eviction.put(1, name_of(1), USUAL, 5)
    assert eviction.num_retained == 2
    assert evicted(eviction) == [4, 2, 3, 1]


def test_units_whose_time_has_passed_go_first():
    eviction: Eviction[int] = Eviction(10, max_retained=10)
    for unit, retention_s in ((1, 5), (2, 0), (3, 60)):
        eviction.put(unit, name_of(unit), USUAL, retention_s)
    eviction.pass_time(5)
    assert [eviction.rank(unit) for unit in (1, 2, 3)] == [0, 1, 2]
    assert evicted(eviction) == [1, 2, 3]


def test_few_units_are_kept_for_a_time():
    eviction: Eviction[int] = Eviction(10, max_retained=1)
    for unit in (1, 2, 3):
        eviction.put(unit, name_of(unit), USUAL, 60)
    assert evicted(eviction) == [2, 3, 1]
    eviction.put(2, name_of(2), USUAL, 60)
    assert eviction.num_retained == 1, "the time of an evicted unit is over"


@pytest.mark.parametrize("groups", [EVERY_LAYER, (Group(), Group(64))], ids=["whole", "windows"])
@pytest.mark.parametrize("retention_s", [0, 300])
def test_a_chat_is_found_after_others_for_as_long_as_it_asks(
    groups: tuple[Group, ...], retention_s: int
):
    capacity = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_model_len=512,
                        max_num_batched_tokens=512, groups=groups)  # fmt: skip
    core, worker = Scheduler(100, 10), SimulatedWorker(capacity)
    core.add_worker("w", capacity)
    prompt = list(range(256))

    def num_found(name: str) -> int:
        add_one(core, name, prompt, SamplingParams(seed=0, max_tokens=1), retention_s=retention_s)
        sequence = core.sequences[name, 1]
        finish(core, worker)
        return sequence.num_cached

    def others(name: str) -> None:
        for number in range(6):
            add(core, f"{name}{number}", [1000 + number, *range(200)])
            finish(core, worker)

    num_found("first")
    others("a")
    found = num_found("second")
    assert found == (0 if not retention_s else 240)
    core.pass_time(301)
    others("b")
    others("c")
    assert num_found("third") == 0
