"""Random schedules of workers with stores, which outlive the workers."""

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
from msgspec.structs import replace

from services.scheduler.extension import Cell
from services.scheduler.scheduler import Planned
from services.scheduler.sequence import Sequence
from services.scheduler.stores.cell import CellStores
from services.scheduler.stores.copies import StoreCopies
from services.scheduler.worker_state import WorkerState
from shared.link.peer import Peer
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import (
    EVERY_LAYER,
    Copied,
    Forget,
    Inventory,
    Load,
    ModelInfo,
    Save,
    StepPlan,
    StepResult,
)
from shared.wire.token_arrays import TokenArrays
from tests.mesh.arena_parts import connect
from tests.services.scheduler.schedules import WEIGHTS, Mesh
from tests.services.scheduler.simulated_worker import SimulatedWorker, Slot

Content = list[int]
CONFIG = SchedulerConfig(mesh_dir=Path("/nonexistent"), instance="s")
MODEL = ModelInfo(["m"], "f", 1000, 64, 1)


@dataclass
class SimulatedStore:
    """``records`` by place: a key and what a block had. A store that ``is_down`` takes no more."""

    name: str
    num_places: int
    place_bytes: int
    records: dict[int, tuple[bytes, Content]] = field(default_factory=dict)
    is_down: bool = False
    is_locked: bool = True

    def inventory(self, location: str) -> tuple[Inventory, list[np.ndarray]]:
        """Records written last win."""
        full = {key: place for place, (key, _) in self.records.items()}
        keys = np.frombuffer(b"".join(full), np.uint8)
        places = np.array([*full.values()], np.int32)
        return Inventory(self.name, location, self.num_places, self.place_bytes), [keys, places]


@dataclass
class StoringWorker(SimulatedWorker):
    """Reads the ``stores`` of its location by name, and saves in its ``own`` one. Cached ids are
    checked when their sequence is first computed."""

    own: SimulatedStore = field(default_factory=lambda: SimulatedStore("", 1, 1))
    stores: dict[str, SimulatedStore] = field(default_factory=dict)
    num_loaded: int = 0
    num_lost: int = 0
    num_saved: int = 0
    unread: list[Slot] = field(default_factory=list)
    answers: list[Copied] = field(default_factory=list)

    def step(self, planned: Planned) -> tuple[StepResult, TokenArrays]:
        if (copied := self.copy(planned.plan)) is not None:
            self.answers.append(copied)
        return super().step(planned)

    def copy(self, plan: StepPlan) -> Copied | None:
        lost, unsaved = [], []
        kinds = [type(each) for each in plan.rows]
        assert kinds == sorted(kinds, key=[Forget, Save, Load].index)
        for row in plan.rows:
            match row:
                case Forget(place):
                    self.own.records.pop(place, None)
                case Save(key, block, place):
                    assert place < self.own.num_places
                    assert len(self.kv[block]) == self.capacity.block_size, "a part of a block"
                    if self.own.is_down:
                        unsaved.append(key)
                    else:
                        self.own.records.pop(place, None)
                        self.own.records[place] = key, list(self.kv[block])
                        self.num_saved += 1
                case Load(key, block, store, place):
                    self.check_load(plan, block)
                    found, content = self.stores[store].records.get(place, (b"", []))
                    if found == key:
                        self.kv[block] = list(content)
                        self.num_loaded += 1
                    else:
                        lost.append(key)
                        self.num_lost += 1
        if not {Save, Load} & {*kinds}:
            return None
        return Copied(plan.step, lost, unsaved, is_down=self.own.is_down)

    def check_load(self, plan: StepPlan, block: int) -> None:
        """A block to load belongs to a sequence that was admitted before, and not computed yet."""
        (number,) = (each for each, slot in self.slots.items() if block in slot.tables[0])
        assert number not in plan.release
        slot = self.slots[number]
        assert slot in self.unread
        end = (slot.tables[0].index(block) + 1) * self.capacity.block_size
        assert end <= slot.admit.num_cached

    def _find_cached(self, slot: Slot) -> None:
        self.unread.append(slot)

    def _check_rows(self, plan: StepPlan) -> int:
        for row in (*plan.prefill, *plan.decode):
            if (slot := self.slots[row.slot]) in self.unread:
                self.unread.remove(slot)
                super()._find_cached(slot)
        return super()._check_rows(plan)


class StoreMesh(Mesh):
    """Workers have stores in two locations. A store without a worker gets the next one."""

    weights: ClassVar[dict[str, float]] = {
        **WEIGHTS,
        "join": 2,
        "kill_worker": 2,
        "answer": 2,
        "lose_records": 0.5,
        "break_store": 0.3,
        "look": 0.5,
    }

    def __init__(self, random: Random) -> None:
        self.peers: dict[str, Peer] = {}
        self.copied: dict[tuple[str, int], Copied] = {}
        self.stores: dict[str, dict[str, SimulatedStore]] = {"a": {}, "b": {}}
        self.num_places = random.choice([1, 3, 10, 40, 200])
        self.place_bytes = random.choice([1, 6 << 20, 20 << 20])
        self.now_s = 0.0
        self.all_workers: list[StoringWorker] = []
        super().__init__(random)

    def join(self) -> None:
        if not self.peers and not self.num_workers:
            self.capacity = replace(
                self.capacity, groups=EVERY_LAYER, num_states=None, num_stages=1
            )
            cell = Cell(CONFIG, self.core, self.peers, lambda: None)
            self.cell = CellStores(cell)
        before = {*self.workers}
        super().join()
        for worker_id in self.workers.keys() - before:
            self.attach(worker_id)

    def attach(self, worker_id: str) -> None:
        """Its store may be the one of a worker before it. Some have none."""
        plain = self.workers[worker_id]
        location = self.random.choice("aab")
        stores = self.stores[location]
        own = next((each for each in stores.values() if not each.is_locked), None)
        if own is None:
            name = f"{location}{len(stores)}"
            own = stores[name] = SimulatedStore(name, self.num_places, self.place_bytes)
        own.is_locked, own.is_down = True, False
        worker = StoringWorker(
            plain.capacity,
            plain.stop,
            is_fast=plain.is_fast,
            repeats=plain.repeats,
            own=own,
            stores=stores,
        )
        self.workers[worker_id] = worker
        self.all_workers.append(worker)
        peer = self.peers[worker_id] = connect("worker", MODEL, plain.capacity, worker_id)
        if self.random.random() < 0.9:
            message, arrays = own.inventory(location)
            assert self.cell.receives(peer, message, arrays)

    def left(self, before: set[str]) -> None:
        for worker_id in before - self.workers.keys():
            self.cell.on_detach(self.peers.pop(worker_id))
            for key in [each for each in self.copied if each[0] == worker_id]:
                del self.copied[key]
        for each in self.all_workers:
            each.own.is_locked = any(each.own is worker.own for worker in self.living)

    @property
    def living(self) -> list[StoringWorker]:
        return [each for each in self.workers.values() if isinstance(each, StoringWorker)]

    def kill_worker(self) -> None:
        before = {*self.workers}
        super().kill_worker()
        self.left(before)

    def release_worker(self) -> None:
        before = {*self.workers}
        super().release_worker()
        self.left(before)

    def check_plan(self, worker: WorkerState, planned: Planned, runnable: list[Sequence]) -> None:
        super().check_plan(worker, planned, runnable)
        most = max(1, min(256, (16 << 20) // self.place_bytes))
        for kind in (Load, Save):
            assert sum(isinstance(each, kind) for each in planned.plan.rows) <= most
        slots = {row.slot for row in (*planned.plan.prefill, *planned.plan.decode)}
        assert not any(worker.running[slot].allocated.is_loading for slot in slots)

    def plan(self) -> None:
        super().plan()
        for worker_id, worker in self.workers.items():
            assert isinstance(worker, StoringWorker)
            for each in worker.answers:
                self.copied[worker_id, each.step] = each
            worker.answers.clear()

    def answer(self) -> None:
        """A Copied comes some time before its result."""
        if self.results:
            self.answer_of(self.random.choice(sorted(self.results)))

    def answer_of(self, worker_id: str) -> None:
        (result, _), *_ = self.results[worker_id]
        copied = self.copied.pop((worker_id, result.step), None)
        if copied is not None:
            assert self.cell.receives(self.peers[worker_id], copied, [])

    def absorb_from(self, worker_id: str) -> None:
        self.answer_of(worker_id)
        super().absorb_from(worker_id)

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.cell.reset_prefix_cache()
        for sequence in self.core.queues:
            assert not any(each.num_cached(sequence) for each in self.core.workers.values())

    def lose_records(self) -> None:
        for store in (store for each in self.stores.values() for store in each.values()):
            for place in [*store.records]:
                if self.random.random() < 0.3:
                    del store.records[place]

    def break_store(self) -> None:
        if self.living:
            self.random.choice(self.living).own.is_down = True

    def look(self) -> None:
        self.now_s += self.random.choice([1.0, 1000.0])
        self.cell.look(self.now_s)

    def check(self) -> None:
        super().check()
        for location in self.cell._locations.values():
            for store in location.stores.values():
                full = store.places.values()
                assert len({*full, *store._free}) == len(full) + len(store._free)
                if isinstance(store.owner, StoreCopies):
                    saving = [
                        each
                        for sent in store.owner._sent
                        if not sent.is_answered
                        for each in sent.saves.values()
                    ]
                    assert len(full) + len(store._free) + len(saving) == store.num_places
                    assert not {*saving} & {*full, *store._free}
        for stores in self.stores.values():
            for each in stores.values():
                for key, content in each.records.values():
                    assert content == self.names[key][-self.capacity.block_size :]

    def finish(self) -> None:
        super().finish()
        for location in self.cell._locations.values():
            assert not location.saving
            assert not location.dropped
            assert not any(store._pins for store in location.stores.values())
        for copies in self.cell._copies.values():
            assert not copies._to_load
            assert not copies._held
