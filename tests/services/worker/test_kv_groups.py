"""The groups of a model's layers, and the layers that share a section."""

from collections import Counter
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.worker.machine.kv_groups import (
    KVSpec,
    LayerGroups,
    Place,
    group_layers,
    pack,
)
from services.worker.service import WorkerService
from shared.settings.worker import WorkerConfig
from shared.wire.kv_groups import most_blocks, tokens_that_fit
from shared.wire.messages import (
    EVERY_LAYER,
    GROUPS_MINOR,
    MAX_GROUPS,
    PROTOCOL_MAJOR,
    Capacity,
    Group,
    Hello,
)

ENTRY = (2, 8, 64)
CAPACITY = Capacity(0, 16, 8, 512, 131_072)
FULL = None


def grouped(
    windows: list[int | None], capacity: Capacity = CAPACITY
) -> tuple[list[int | None], list[int]]:
    """The windows of the groups, and the numbers of layers in each."""
    found = group_layers([KVSpec(ENTRY, window) for window in windows], capacity)
    nums = Counter(found.of_layers)
    return [group.window for group in found.groups], [nums[at] for at in range(len(nums))]


def test_two_kinds_of_equal_number_are_two_groups() -> None:
    """As in gpt-oss."""
    assert grouped([128, FULL] * 18) == ([FULL, 128], [18, 18])


def test_many_layers_with_a_window_are_several_groups_as_large_as_that_without() -> None:
    """As in Gemma 3 27B."""
    windows = [FULL if layer % 6 == 5 else 1024 for layer in range(62)]
    assert grouped(windows) == ([FULL] + [1024] * 6, [10, 9, 9, 9, 9, 8, 8])


@pytest.mark.parametrize(
    ("max_len", "expected"), [(131_072, ([FULL, 128], [30, 10])), (1000, ([FULL], [40]))]
)
def test_few_layers_with_a_window_have_a_group_if_that_saves_memory(
    max_len: int, expected: tuple[list[int | None], list[int]]
) -> None:
    """A block of their group would have 20 empty sections."""
    windows = [FULL] * 30 + [128] * 10
    assert grouped(windows, replace(CAPACITY, max_model_len=max_len)) == expected


def test_one_window_of_all_layers_is_one_group() -> None:
    assert grouped([4096] * 32) == ([4096], [32])


@pytest.mark.parametrize("window", [FULL, 131_072, 200_000])
def test_windows_that_hide_nothing_are_none(window: int | None) -> None:
    assert grouped([window] * 4) == ([FULL], [4])
    assert grouped([window, 100]) == ([FULL, 100], [1, 1])


@pytest.mark.parametrize(
    ("windowed", "whole", "nums", "expected"),
    [
        ((2, 16, 256), (2, 4, 512), (50, 10), [10, *[5] * 10]),
        ((2, 1, 256), (2, 1, 512), (12, 3), [3, 6, 6]),
        ((2, 8, 256), (2, 2, 512), (25, 5), [5, *[2] * 12, 1]),
    ],
    ids=["Gemma 4 31B", "Gemma 4 E2B", "Gemma 4 26B-A4B, a fifth of some blocks empty"],
)
def test_a_block_has_more_layers_with_smaller_entries(
    windowed: tuple[int, ...], whole: tuple[int, ...], nums: tuple[int, int], expected: list[int]
) -> None:
    layers = [KVSpec(windowed, 512)] * nums[0] + [KVSpec(whole)] * nums[1]
    found = group_layers(layers, CAPACITY)
    assert found.groups == (Group(), *[Group(512)] * (len(expected) - 1))
    counted = Counter(found.of_layers)
    assert [counted[group] for group in range(len(expected))] == expected


def test_layers_without_entries_are_in_the_first_group() -> None:
    layers = [KVSpec((2, 0, 0)), KVSpec(ENTRY, 128), KVSpec(ENTRY)]
    assert group_layers(layers, CAPACITY) == LayerGroups((Group(), Group(128)), (0, 1, 0))


def test_layers_of_one_size_have_sections_for_themselves() -> None:
    sections, places = pack([8, 8, 8, 8, 8], [0, 1, 0, 2, 2])
    assert sections == [8, 8]
    assert places == [Place(section, 0, 8) for section in (0, 0, 1, 0, 1)]
    assert pack([3, 0, 5], [0, 0, 0]).sections == [3, 5]
    assert pack([0, 0], [0, 1]) == ([0], [Place(0, 0, 0)] * 2)


def test_layers_of_other_sizes_share_a_section_that_ends_where_they_do() -> None:
    sections, places = pack([8, 4, 4, 8, 4, 4, 2], [1, 0, 0, 1, 0, 0, 0])
    assert sections == [8, 8, 2]
    places_of_whole = [Place(0, 0, 4), Place(0, 4, 4), Place(1, 0, 4), Place(1, 4, 4)]
    assert [places[at] for at in (1, 2, 4, 5)] == places_of_whole
    assert [places[at] for at in (0, 3, 6)] == [Place(0, 0, 8), Place(1, 0, 8), Place(2, 0, 2)]


def test_more_windows_than_a_worker_may_have_groups_are_one_group() -> None:
    windows: list[int | None] = [64 * (each + 1) for each in range(MAX_GROUPS + 1)]
    assert grouped(windows) == ([FULL], [17])
    assert grouped(windows[1:]) == (windows[1:], [1] * MAX_GROUPS)


def test_each_half_of_the_layers_has_as_many_of_each_group() -> None:
    windows = [FULL if layer % 6 == 5 else 1024 for layer in range(48)]
    found = group_layers([KVSpec(ENTRY, window) for window in windows], CAPACITY)
    assert len(found.groups) == 6
    for own in (found.of_layers[:24], found.of_layers[24:]):
        assert set(Counter(own).values()) == {4}
        places = pack([1] * 24, own).places
        assert Counter(each.section for each in places) == dict.fromkeys(range(4), 6)


@given(
    st.lists(st.sampled_from([FULL, 128, 1024]), min_size=1, max_size=40),
    st.lists(st.sampled_from([8, 16, 24]), min_size=40, max_size=40),
    st.sampled_from([100, 1000, 10_000]),
)
def test_layers_of_a_group_have_its_window_and_places_of_their_own(
    windows: list[int | None], sizes: list[int], max_len: int
) -> None:
    capacity = replace(CAPACITY, max_model_len=max_len)
    layers = [KVSpec((size,), window) for size, window in zip(sizes, windows, strict=False)]
    found = group_layers(layers, capacity)
    assert len(found.groups) <= MAX_GROUPS
    assert set(found.of_layers) == set(range(len(found.groups)))
    sections, places = pack([each.size for each in layers], found.of_layers)
    starts = [0, *accumulate(sections)]
    taken: Counter[tuple[int, int]] = Counter()
    for group, (section, start, size) in zip(found.of_layers, places, strict=True):
        assert start + size <= sections[section]
        first = starts[section] + start
        taken.update((group, place) for place in range(first, first + size))
    assert max(taken.values()) == 1
    if found.groups == EVERY_LAYER:
        return
    for window, group in zip(windows, found.of_layers, strict=True):
        visible = None if window is None or window >= max_len else window
        assert found.groups[group].window == visible
    num_blocks = most_blocks(replace(capacity, groups=found.groups), max_len)
    of_whole = sum(each.size for each in layers) * -(-max_len // 16)
    assert sum(sections) * num_blocks <= of_whole * 1.05


def test_more_tokens_fit_in_long_requests() -> None:
    plain = replace(CAPACITY, num_blocks=1000)
    assert tokens_that_fit(plain, 100) == tokens_that_fit(plain, 99_999) == 16_000
    both = replace(plain, groups=(Group(), Group(128)))
    assert tokens_that_fit(both, 16) == 1000 * 16 // 2
    assert tokens_that_fit(both, 8000) == 1000 * 8000 // most_blocks(both, 8000)
    assert tokens_that_fit(both, 80_000) > tokens_that_fit(both, 8000) > 14_000


@pytest.mark.parametrize("groups", [(Group(128),), (Group(), Group(128))])
def test_a_scheduler_that_knows_of_no_groups_is_refused(groups: tuple[Group, ...]) -> None:
    service: Any = WorkerService(WorkerConfig(), lambda config, progress: None)
    service._engine = SimpleNamespace(capacity=CAPACITY)
    older = Hello(PROTOCOL_MAJOR, GROUPS_MINOR - 1, "scheduler", "s")
    assert service.refusal(older) is None
    service._engine = SimpleNamespace(capacity=replace(CAPACITY, groups=groups))
    refused = "protocol minor 6 knows of no groups of layers with windows, 7 does"
    assert service.refusal(older) == refused
    assert service.refusal(replace(older, minor=GROUPS_MINOR)) is None
