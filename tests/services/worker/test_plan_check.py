"""A worker refuses plans with blocks or states that do not fit its layers."""

import numpy as np
import pytest
from msgspec.structs import replace

from services.worker.plan_check import PlanCheck
from shared.errors import CodecError
from shared.wire.messages import (
    EVERY_LAYER,
    Admit,
    Capacity,
    Drop,
    Extend,
    Group,
    Keep,
    SamplingParams,
    StepPlan,
)

NULL = 100
CAPACITY = Capacity(NULL, 16, 4, 512, 1024, 50, groups=(Group(), Group(20), Group(20)))
ONE_WINDOW = Capacity(NULL, 16, 4, 512, 1024, 50, groups=(Group(20),))


def admit(num_ids: int, num_cached: int, *blocks: list[int]) -> Admit:
    params = SamplingParams(seed=0)
    row = (0, "r", 1, 0, 0, num_ids, num_ids, num_cached)
    return Admit(*row, params, blocks[0], more_blocks=[*blocks[1:]])


def plan(
    row: Admit | None = None, extend: Extend | None = None, drops: list[Drop] | None = None
) -> StepPlan:
    rows = [row] if row else [], [extend] if extend else []
    return StepPlan(1, [], *rows, [], [], rows=[*(drops or [])])


def check(*plans: StepPlan, capacity: Capacity = CAPACITY) -> None:
    checks = PlanCheck(capacity, capacity.vocab_size)
    for each in plans:
        num_ids = sum(row.num_ids for row in each.admit)
        checks.check(each, np.zeros(num_ids, np.int32))


ADMITTED = plan(admit(100, 0, [*range(7)], [7, 8], [9]))


def test_lists_of_groups_may_have_different_lengths() -> None:
    check(ADMITTED, plan(extend=Extend(0, [], [[10, 11], [12]])))


@pytest.mark.parametrize("more", [[], [[1]], [[1], [2], [3]]])
def test_each_group_has_a_list(more: list[list[int]]) -> None:
    with pytest.raises(CodecError, match=f"blocks in {len(more) + 1} groups of 3"):
        check(plan(admit(100, 0, [0], *more)))
    with pytest.raises(CodecError, match=f"blocks in {len(more) + 1} groups of 3"):
        check(ADMITTED, plan(extend=Extend(0, [0], more)))


@pytest.mark.parametrize("block", [NULL, NULL + 1])
@pytest.mark.parametrize("group", range(3))
def test_only_the_blocks_behind_a_window_are_null(group: int, block: int) -> None:
    lists: list[list[int]] = [[0], [1], [2]]
    lists[group] = [block]
    with pytest.raises(CodecError, match=f"up to {block}"):
        check(plan(admit(9, 0, *lists)))
    with pytest.raises(CodecError, match=f"up to {block}"):
        check(ADMITTED, plan(extend=Extend(0, lists[0], lists[1:])))


def test_a_hit_has_exactly_the_blocks_that_are_not_passed() -> None:
    """After 96 ids, 64 of them are behind a window of 20 and the keys that are read with it."""
    full, passed = [*range(7)], [NULL] * 4
    check(plan(admit(112, 96, full, [*passed, 7, 8], [*passed, 9, 10])))
    for wrong in ([*passed, NULL, 8], [*passed[1:], 20, 7, 8], [1, *passed[1:], 7, 8]):
        with pytest.raises(CodecError, match=r"behind a window|up to 100"):
            check(plan(admit(112, 96, full, [*passed, 7, 8], wrong)))
    with pytest.raises(CodecError, match="96 cached"):
        check(plan(admit(112, 96, full, [*passed, 7, 8], [*passed, 9])))
    check(plan(admit(112, 96, [*passed, 7, 8])), capacity=ONE_WINDOW)
    with pytest.raises(CodecError, match="4 are null blocks"):
        check(plan(admit(112, 96, full)), capacity=ONE_WINDOW)


@pytest.mark.parametrize(
    ("drops", "problem"),
    [
        ([Drop(0, 0, 1)], "group 0 has no window"),
        ([Drop(0, 3, 1)], "group 3 has no window, or does not exist"),
        ([Drop(1, 1, 1)], "slot 1 was not admitted"),
        ([Drop(0, 1, 3)], "drops 3 blocks of group 1, where it has 2 and dropped 0"),
        ([Drop(0, 1, 2), Drop(0, 1, 1)], "drops 1 blocks of group 1, where it has 2 and dropped 2"),
        ([Drop(0, 2, 2)], "drops 2 blocks of group 2"),
    ],
)
def test_a_drop_stays_in_its_table(drops: list[Drop], problem: str) -> None:
    with pytest.raises(CodecError, match=problem):
        check(ADMITTED, plan(drops=drops))


def test_drops_go_on_from_earlier_ones() -> None:
    steps = [plan(drops=[Drop(0, 1, 1), Drop(0, 2, 1)]), plan(drops=[Drop(0, 1, 2)])]
    check(ADMITTED, *steps)
    with pytest.raises(CodecError, match="drops 0 blocks"):
        check(ADMITTED, *steps, plan(drops=[Drop(0, 1, 0)]))
    hit = plan(admit(112, 96, [*range(7)], *([NULL] * 4 + [7, 8] for _ in range(2))))
    with pytest.raises(CodecError, match="dropped 4"):
        check(hit, plan(drops=[Drop(0, 1, 3)]))


def test_a_table_does_not_outgrow_a_slot() -> None:
    with pytest.raises(CodecError, match="66 blocks"):
        check(ADMITTED, plan(extend=Extend(0, [], [[0] * 64, []])))


@pytest.mark.parametrize(("num_states", "state"), [(None, 0), (0, 0), (3, 3)])
def test_a_state_has_a_place(num_states: int | None, state: int) -> None:
    capacity = replace(CAPACITY, groups=EVERY_LAYER, num_states=num_states)
    plain = admit(100, 0, [*range(7)])
    check(plan(plain), capacity=capacity)
    keep = StepPlan(1, [], [], [], [], [], rows=[Keep(0, state)])
    hit = replace(plain, num_cached=64)
    wrong = [
        [plan(replace(hit, from_state=state))],
        [plan(replace(plain, to_state=state))],
        [plan(plain), keep],
    ]
    for plans in wrong:
        with pytest.raises(CodecError, match=f"state {state}; there is room for {num_states or 0}"):
            check(*plans, capacity=capacity)
    with pytest.raises(CodecError, match="slot 0 was not admitted"):
        check(keep, capacity=capacity)


@pytest.mark.parametrize(("num_cached", "state"), [(64, None), (0, 1), (48, 1)])
def test_a_sequence_begins_with_the_state_of_its_cached_ids(
    num_cached: int, state: int | None
) -> None:
    capacity = replace(CAPACITY, groups=EVERY_LAYER, num_states=3)
    row = replace(admit(100, num_cached, [*range(7)]), from_state=state)
    with pytest.raises(CodecError, match=f"begins with {num_cached} ids and state {state}"):
        check(plan(row), capacity=capacity)
    check(plan(replace(row, num_cached=64, from_state=1)), capacity=capacity)
