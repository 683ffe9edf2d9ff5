"""A simulated worker that saves and loads blocks."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import numpy as np

from services.scheduler.scheduler import Planned
from shared.wire.messages import (
    FIRST_STATE,
    Copied,
    Fetch,
    Fetched,
    Forget,
    Inventory,
    Load,
    Save,
    Spill,
    Spilled,
    StepPlan,
    StepResult,
    Unfetch,
)
from shared.wire.token_arrays import TokenArrays
from tests.services.scheduler.simulated_worker import SimulatedWorker, Slot, State, state_of

Content = list[int] | State
ROWS = [Forget, Spill, Save, Load, Unfetch, Fetch]


@dataclass
class SimulatedStore:
    """``records`` by place: a key and the content of its block, or state; ``groups`` has the group
    of layers of each key. Records of the keys
    ``lost`` were damaged. A store that ``is_down`` takes no more; a worker that saves in it has it
    ``is_locked``."""

    name: str
    num_places: int
    place_bytes: int
    records: dict[int, tuple[bytes, Content]] = field(default_factory=dict)
    groups: dict[bytes, int] = field(default_factory=dict)
    lost: set[bytes] = field(default_factory=set)
    is_down: bool = False
    is_locked: bool = True
    num_states: int = 0
    state_bytes: int = 0
    is_disk: bool = False

    def damage(self, random: Random, share: float = 0.3) -> None:
        for place, (key, _) in [*self.records.items()]:
            if random.random() < share:
                del self.records[place]
                self.lost.add(key)

    def inventory(self, location: str) -> tuple[Inventory, list[np.ndarray]]:
        """Records written last win."""
        full = {key: place for place, (key, _) in self.records.items()}
        keys = np.frombuffer(b"".join(full), np.uint8)
        places = np.array([*full.values()], np.int32)
        sizes = self.num_places, self.place_bytes, self.num_states, self.state_bytes
        return Inventory(self.name, location, *sizes, is_on_disk=self.is_disk), [keys, places]


Job = Callable[[], Fetched | Spilled | None]


@dataclass
class StoringWorker(SimulatedWorker):
    """Reads the ``stores`` of its location by name, and saves in its ``own`` one. Cached ids are
    checked when their sequence is first computed."""

    own: SimulatedStore | None = None
    stores: dict[str, SimulatedStore] = field(default_factory=dict)
    num_loaded: int = 0  # blocks
    num_lost: int = 0
    num_saved: int = 0
    num_states_loaded: int = 0
    num_windows_loaded: int = 0
    unread: set[int] = field(default_factory=set)
    group_of: dict[int, int] = field(default_factory=dict)  # of each block but moved ones
    answers: list[Copied] = field(default_factory=list)
    disk: SimulatedStore | None = None
    disks: dict[str, SimulatedStore] = field(default_factory=dict)
    held: dict[bytes, list[Content]] = field(default_factory=dict)
    reads: deque[Job] = field(default_factory=deque)  # of the disk, to be done in order
    writes: deque[Job] = field(default_factory=deque)
    num_fetched: int = 0
    num_spilled: int = 0
    byte_s: float = 0.0  # of copies that are measured

    def step(self, planned: Planned) -> tuple[StepResult, TokenArrays]:
        if (copied := self.copy(planned.plan)) is not None:
            self.answers.append(copied)
        output = super().step(planned)
        for slot in self.slots.values():
            for group, table in enumerate(slot.tables):
                self.group_of |= dict.fromkeys(table, group)
        return output

    def copy(self, plan: StepPlan) -> Copied | None:
        lost: list[bytes] = []
        unsaved: list[bytes] = []
        load_s = 0.0
        rows = [each for each in plan.rows if type(each) in ROWS]
        if not rows:
            return None
        own = self.own
        assert own is not None
        kinds = [type(each) for each in rows]
        assert kinds == sorted(kinds, key=ROWS.index)
        self._begin_on_disk(plan.step, rows)
        for row in rows:
            match row:
                case Forget(place, is_on_disk=False):
                    own.records.pop(place, None)
                case Save(key, block, place):
                    if own.is_down:
                        unsaved.append(key)
                    else:
                        own.records.pop(place, None)
                        own.records[place] = key, self._content(block, place)
                        if place < FIRST_STATE:
                            self.check_group(own, key, self.group_of.get(block, 0))
                        self.num_saved += 1
                case Load(key, block, store, place, number, is_fetched):
                    load_s += self.byte_s * own.place_bytes
                    if is_fetched:
                        found, content = key, self.held[key].pop()
                    else:
                        found, content = self.stores[store].records.get(place, (b"", []))
                    if number is None:
                        group = self.check_load(plan, block)
                    else:
                        self.check_state(plan, number, block)
                    if found != key:
                        lost.append(key)
                        self.num_lost += 1
                    elif isinstance(content, list):
                        self.kv[block] = list(content)
                        stores = self.disks if is_fetched else self.stores
                        self.check_group(stores[store], key, group)
                        self.num_loaded += 1
                        self.num_windows_loaded += self.capacity.groups[group].window is not None
                    else:
                        assert number is not None
                        self.states[block] = self.slots[number].state = content
                        self.num_states_loaded += 1
        if not {*kinds} & {Save, Load}:
            return None
        return Copied(plan.step, lost, unsaved, own.is_down, load_s)

    def _begin_on_disk(self, step: int, rows: Sequence[object]) -> None:
        """Contents of spilled places are read at once, others when the disk does its jobs."""
        own, disk = self.own, self.disk
        assert own is not None
        spills = []
        for row in rows:
            match row:
                case Forget(place, is_on_disk=True):
                    assert disk is not None
                    self.writes.append(partial(self._forget, disk, place))
                case Spill(key, place, place_on_disk):
                    spills.append((key, place_on_disk, own.records.get(place)))
                case Unfetch(key):
                    self.held[key].pop()
        if spills:
            self.writes.append(partial(self._spill, step, spills))
        if fetches := [each for each in rows if isinstance(each, Fetch)]:
            self.reads.append(partial(self._fetch, step, fetches))

    def _forget(self, disk: SimulatedStore, place: int) -> None:
        disk.records.pop(place, None)

    def _spill(
        self, step: int, spills: list[tuple[bytes, int, tuple[bytes, Content] | None]]
    ) -> Spilled:
        own, disk, unsaved = self.own, self.disk, []
        assert own is not None
        assert disk is not None
        for key, place, record in spills:
            if disk.is_down or record is None or record[0] != key:
                unsaved.append(key)
                continue
            assert place - FIRST_STATE < disk.num_states
            assert place >= FIRST_STATE or place < disk.num_places
            disk.records[place] = record
            if key in own.groups:
                self.check_group(disk, key, own.groups[key])
            self.num_spilled += 1
        return Spilled(step, unsaved, disk.is_down)

    def _fetch(self, step: int, rows: list[Fetch]) -> Fetched:
        lost = []
        for row in rows:
            found, content = self.disks[row.store].records.get(row.place, (b"", []))
            if found == row.key:
                self.held.setdefault(row.key, []).append(content)
                self.num_fetched += 1
            else:
                lost.append(row.key)
                self.num_lost += 1
        fetch_s = sum(self.byte_s * self.disks[row.store].place_bytes for row in rows)
        return Fetched(step, lost, fetch_s)

    def _content(self, block: int, place: int) -> Content:
        """Of a block, or of a copy of a state."""
        assert self.own is not None
        if place >= FIRST_STATE:
            assert place - FIRST_STATE < self.own.num_states
            return self.states[block]
        assert place < self.own.num_places
        assert len(self.kv[block]) == self.capacity.block_size, "a part of a block"
        return list(self.kv[block])

    def check_state(self, plan: StepPlan, number: int, copy: int) -> None:
        """A state to load belongs to a sequence that was admitted before with that copy."""
        assert number not in plan.release
        assert number in self.unread
        admit = self.slots[number].admit
        assert admit.from_state == admit.to_state == copy

    def _begin_state(self, slot: Slot) -> None:
        """A copy that is its own may be loaded until the first token."""
        admit = slot.admit
        if admit.from_state is None or admit.from_state != admit.to_state:
            super()._begin_state(slot)
            return
        slot.copies_to = admit.to_state
        slot.state = self.states.get(admit.from_state, slot.state)

    def check_load(self, plan: StepPlan, block: int) -> int:
        """A block to load belongs to a sequence that was admitted before, and not computed yet.
        Returns its group of layers."""
        ((number, group, table),) = (
            (number, group, table)
            for number, slot in self.slots.items()
            for group, table in enumerate(slot.tables)
            if block in table
        )
        assert number not in plan.release
        assert number in self.unread
        end = (table.index(block) + 1) * self.capacity.block_size
        assert end <= self.slots[number].admit.num_cached
        return group

    def check_group(self, store: SimulatedStore, key: bytes, group: int) -> None:
        """Layers of other groups have other bytes."""
        assert store.groups.setdefault(key, group) == group

    def _find_cached(self, slot: Slot) -> None:
        self.unread.add(slot.admit.slot)

    def _check_rows(self, plan: StepPlan) -> int:
        numbers = [row.slot for row in plan.prefill] + [row.slot for row in plan.decode]
        for number in numbers:
            if number in self.unread:
                self.unread.remove(number)
                slot = self.slots[number]
                super()._find_cached(slot)
                if self.capacity.num_states is not None:
                    assert slot.state == state_of(slot.ids[: slot.num_computed])
        return super()._check_rows(plan)
