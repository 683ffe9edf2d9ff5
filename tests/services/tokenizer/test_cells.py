"""The cell of a prompt."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.tokenizer.schedulers import (
    BEGINNING,
    MAX_EXCESS,
    Cell,
    Schedulers,
    beginning_of,
    choose_cell,
)
from shared.errors import Unavailable
from shared.wire.envelope import RequestOptions
from shared.wire.messages import (
    MEDIA_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    VIDEO_MINOR,
    Generate,
    Heartbeat,
    Hello,
    Item,
    NewSequence,
    Overview,
    SamplingParams,
    State,
)
from tests.mesh.arena_parts import FakePeer

SLOTS = st.lists(st.integers(1, 64), min_size=1, max_size=6)
PROMPTS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=150)
IDS = np.arange(2 * BEGINNING, dtype=np.int32)
PLAIN = RequestOptions()


def cells_of(slots: list[int], loads: list[int]) -> list[Cell]:
    pairs = enumerate(zip(slots, loads, strict=True))
    return [Cell(f"s{number}", num, load) for number, (num, load) in pairs]


@given(SLOTS, PROMPTS)
def test_no_cell_has_much_more_than_its_part_and_none_waits_while_others_have_slots(
    slots: list[int], prompts: list[tuple[int, int]]
) -> None:
    """Some share a beginning, some are short (0)."""
    loads = [0] * len(slots)
    for number, (kind, num_new) in enumerate(prompts):
        cells = cells_of(slots, loads)
        beginning = bytes([kind]) if kind else None
        index = cells.index(choose_cell(cells, num_new, beginning, f"r{number}"))
        part = (sum(loads) + num_new) * slots[index] / sum(slots)
        if beginning is not None:
            assert loads[index] < max(part, min(MAX_EXCESS * part, slots[index]))
        else:
            lowest = min((load + num_new) / num for load, num in zip(loads, slots, strict=True))
            assert (loads[index] + num_new) / slots[index] == lowest
        loads[index] += num_new


@given(SLOTS, st.binary(max_size=8))
def test_prompts_with_a_common_prefix_go_to_one_cell_up_to_its_share(
    slots: list[int], beginning: bytes
) -> None:
    idle = cells_of(slots, [0] * len(slots))
    first = choose_cell(idle, 1, beginning, "a")
    busy = cells_of(slots, [100 * num for num in slots])
    assert choose_cell(busy, 1, beginning, "b").name == first.name
    others = [each for each in idle if each is not first]
    for gone in others:
        left = [each for each in idle if each is not gone]
        assert choose_cell(left, 1, beginning, "c") is first, "another one's end moves nothing"
    if others:
        full = [each._replace(load=each.num_slots) if each is first else each for each in idle]
        assert choose_cell(full, 1, beginning, "d") in others


def test_beginnings_are_shared_out_by_the_slots_of_the_cells() -> None:
    cells = [Cell("a", 10, 0), Cell("b", 30, 0)]
    counts = Counter(choose_cell(cells, 1, b"%d" % number, "r").name for number in range(2000))
    assert 400 < counts["a"] < 600


def test_prompts_have_a_beginning_in_common_with_the_same_salt_and_first_ids_alone() -> None:
    other = IDS.copy()
    other[BEGINNING] = 7
    assert beginning_of(IDS, PLAIN) == beginning_of(other, PLAIN)
    other[0] = 7
    assert beginning_of(IDS, PLAIN) != beginning_of(other, PLAIN)
    assert beginning_of(IDS, PLAIN) != beginning_of(IDS, RequestOptions(salt="salt"))
    assert beginning_of(IDS[: BEGINNING - 1], PLAIN) is None


def item(start: int, digest: int) -> Item:
    return Item(start=start, num_tokens=4, size=(1, 56, 56), digest=bytes([digest]) * 16)


def test_prompts_have_a_beginning_in_common_with_the_same_first_image_in_it_alone() -> None:
    first, second = item(5, 1), item(5, 2)
    assert beginning_of(IDS, PLAIN, [first]) == beginning_of(IDS, PLAIN, [first, item(20, 2)])
    assert beginning_of(IDS, PLAIN, [first]) != beginning_of(IDS, PLAIN, [second])
    assert beginning_of(IDS, PLAIN, [first]) != beginning_of(IDS, PLAIN)
    assert beginning_of(IDS, PLAIN, [item(BEGINNING, 1)]) == beginning_of(IDS, PLAIN)


def scheduler(
    name: str, num_waiting: int = 0, state: State = State.READY, minor: int = PROTOCOL_MINOR
) -> FakePeer:
    peer = FakePeer(Hello(PROTOCOL_MAJOR, minor, "scheduler", name))
    num_workers = int(state == State.READY)
    overview = Overview(name, num_workers, 0, num_waiting, 10, 10, num_slots=8)
    peer.status = Heartbeat(state, "", 0, 0, overview=overview)
    return peer


def prompt(number: int, num: int = 1) -> Generate:
    sequences = [NewSequence(f"r{number}/{choice}") for choice in range(num)]
    return Generate(f"r{number}", 1, SamplingParams(seed=0), sequences)


def test_sent_prompts_count_until_they_end() -> None:
    """Also before a heartbeat confirms it."""
    schedulers, first, second = Schedulers(), scheduler("a"), scheduler("b", num_waiting=3)
    for peer in (first, second):
        schedulers.add(peer)
    assert [schedulers.choose(prompt(number), PLAIN, IDS[:1]) for number in range(3)] == [first] * 3
    assert schedulers.choose(prompt(3, num=3), PLAIN, IDS[:1]) in (first, second)
    assert schedulers.choose(prompt(4), PLAIN, IDS[:1]) in (first, second)
    schedulers.note_end(first, 3)
    assert schedulers.choose(prompt(5), PLAIN, IDS[:1]) is first
    assert second.status.overview is not None
    second.status = replace(second.status, overview=replace(second.status.overview, num_waiting=0))
    first.status = replace(first.status)
    chosen = [schedulers.choose(prompt(number), PLAIN, IDS[:1]) for number in range(6, 12)]
    assert 0 < sum(peer is first for peer in chosen) < 6
    schedulers.remove(first)
    schedulers.note_end(first, 1)


def test_a_scheduler_without_workers_or_that_leaves_gets_nothing_while_there_is_another() -> None:
    schedulers, empty = Schedulers(), scheduler("a", state=State.NOT_READY)
    leaving, staying = scheduler("b"), scheduler("c", num_waiting=100)
    assert leaving.status.overview is not None
    overview = replace(leaving.status.overview, is_leaving=True)
    leaving.status = replace(leaving.status, overview=overview)
    assert schedulers.choose(prompt(0), PLAIN, IDS) is None
    for peer, expected in ((empty, empty), (leaving, leaving), (staying, staying)):
        schedulers.add(peer)
        for ids in (IDS, IDS[:1]):
            assert schedulers.choose(prompt(1), PLAIN, ids) is expected
    schedulers.remove(staying)
    assert schedulers.choose(prompt(2), PLAIN, IDS) is leaving


def test_a_scheduler_that_handed_a_prompt_over_gets_it_only_where_there_is_no_other() -> None:
    schedulers, first = Schedulers(), scheduler("a")
    has_left = RequestOptions(left_scheduler="a")
    schedulers.add(first)
    assert schedulers.choose(prompt(0), has_left, IDS) is first
    schedulers.add(other := scheduler("b", num_waiting=100))
    assert schedulers.choose(prompt(1), has_left, IDS) is other


def test_images_go_to_no_scheduler_of_an_older_release() -> None:
    schedulers, with_image = Schedulers(), replace(prompt(0), items=[item(0, 1)])
    assert schedulers.choose(with_image, PLAIN, IDS) is None
    schedulers.add(older := scheduler("a", minor=MEDIA_MINOR - 1))
    with pytest.raises(Unavailable, match="takes images") as caught:
        schedulers.choose(with_image, PLAIN, IDS)
    assert caught.value.retry_after_s
    minor = VIDEO_MINOR - 1
    schedulers.add(newer := scheduler("b", num_waiting=100, minor=minor))
    assert schedulers.choose(with_image, PLAIN, IDS) is newer
    frames = replace(with_image.items[0], kind="video")
    with_video = replace(with_image, items=[*with_image.items, frames])
    with pytest.raises(Unavailable, match="takes images or videos of the prompt"):
        schedulers.choose(with_video, PLAIN, IDS)
    schedulers.add(newest := scheduler("c", num_waiting=200, minor=VIDEO_MINOR))
    assert schedulers.choose(with_video, PLAIN, IDS) is newest
    schedulers.remove(newer)
    assert schedulers.choose(prompt(1), PLAIN, IDS) is older
