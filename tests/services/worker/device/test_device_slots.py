"""Block tables on the device follow the host's, plan by plan."""

import random

import numpy as np
import pytest
import torch

from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.slots.table import SlotTable
from shared.wire.messages import (
    EVERY_LAYER,
    Admit,
    Capacity,
    Drop,
    Extend,
    Group,
    SamplingParams,
    StepPlan,
)

NUM_SLOTS, MAX_BLOCKS, NUM_BLOCKS = 5, 9, 50
GREEDY = SamplingParams(seed=0, temperature=0.0)
GROUPS = [EVERY_LAYER, (Group(7),), (Group(), Group(7), Group(7))]


class Plans:
    """Random plans: blocks of sequences come and go, a table at a time."""

    def __init__(self, seed: int, capacity: Capacity) -> None:
        self._rng = random.Random(seed)
        self._groups = capacity.groups
        self._held: dict[int, list[int]] = {}  # number of blocks of each group, by slot
        self._dropped: dict[int, list[int]] = {}
        self.num_drops = 0

    def next(self) -> StepPlan:
        release = [slot for slot in self._held if self._rng.random() < 0.1]
        for slot in release:
            del self._held[slot], self._dropped[slot]
        drops = [drop for slot in self._held for drop in self._drops(slot)]
        self.num_drops += len(drops)
        free = [slot for slot in range(NUM_SLOTS) if slot not in self._held]
        admits = [self._admit(slot) for slot in free if self._rng.random() < 0.4]
        slots = 2 * [slot for slot in self._held if self._rng.random() < 0.6]
        return StepPlan(
            1, release, admits, [self._extend(each) for each in slots], [], [], rows=[*drops]
        )

    def _drops(self, slot: int) -> list[Drop]:
        drops = []
        for index, group in enumerate(self._groups):
            if group.window is not None and self._rng.random() < 0.5:
                num = self._rng.randint(self._dropped[slot][index], self._held[slot][index])
                self._dropped[slot][index] = num
                drops.append(Drop(slot, index, num))
        return drops

    def _admit(self, slot: int) -> Admit:
        of_groups = [self._blocks(self._rng.randint(1, 4)) for _ in self._groups]
        passed = [0 if group.window is None else self._rng.randint(0, 1) for group in self._groups]
        for blocks, num in zip(of_groups, passed, strict=True):
            blocks[:num] = num * [NUM_BLOCKS]
        self._held[slot], self._dropped[slot] = list(map(len, of_groups)), passed
        first, *others = of_groups
        return Admit(slot, "r", 0, 0, 0, 1, 1, 0, GREEDY, first, more_blocks=others)

    def _extend(self, slot: int) -> Extend:
        held = self._held[slot]
        nums = [self._rng.randint(0, min(2, MAX_BLOCKS - num)) for num in held]
        self._held[slot] = [num + more for num, more in zip(held, nums, strict=True)]
        first, *others = map(self._blocks, nums)
        return Extend(slot, first, others)

    def _blocks(self, num: int) -> list[int]:
        return self._rng.sample(range(NUM_BLOCKS), num)


@pytest.mark.parametrize("groups", GROUPS, ids=len)
@pytest.mark.parametrize("seed", range(5))
def test_block_tables_follow_the_hosts(groups: tuple[Group, ...], seed: int) -> None:
    capacity = Capacity(NUM_BLOCKS, 4, NUM_SLOTS, 64, 4 * MAX_BLOCKS, 32, groups=groups)
    table, plans = SlotTable(capacity), Plans(seed, capacity)
    slots = DeviceSlots(capacity, table, np.zeros(1, np.int64), torch.device("cpu"))
    for _ in range(60):
        plan = plans.next()
        table.apply(plan, np.zeros(len(plan.admit), np.int32))
        slots.update(table, plan)
        tables = slots.state.block_tables
        np.testing.assert_array_equal(tables[:, :-1], table.block_tables)
        assert (tables[:, -1] == NUM_BLOCKS).all(), "of rows that pad a graph"
    assert (plans.num_drops > 0) == (groups != EVERY_LAYER)
