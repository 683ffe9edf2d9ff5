"""Random schedules of workers with stores, which outlive the workers."""

from pathlib import Path
from random import Random
from typing import ClassVar

from msgspec.structs import replace

from services.scheduler.extension import Cell, OtherCells
from services.scheduler.scheduler import Planned
from services.scheduler.sequence import Sequence
from services.scheduler.stores.cell import CellStores
from services.scheduler.stores.copies import StoreCopies
from services.scheduler.stores.index import Places, group_key, state_key
from services.scheduler.worker_state import WorkerState
from shared.link.peer import Peer
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import (
    Copied,
    Load,
    ModelInfo,
    Save,
)
from tests.mesh.arena_parts import connect
from tests.services.scheduler.schedules import WEIGHTS, Mesh
from tests.services.scheduler.stores.storing_worker import SimulatedStore, StoringWorker

CONFIG = SchedulerConfig(mesh_dir=Path("/nonexistent"), instance="s")
MODEL = ModelInfo(["m"], "f", 1000, 64, 1)


class StoreMesh(Mesh):
    """Workers have stores in two locations. A store without a worker gets the next one."""

    weights: ClassVar[dict[str, float]] = {
        **WEIGHTS,
        "join": 2,
        "kill_worker": 2,
        "answer": 2,
        "lose_records": 3,
        "break_store": 0.3,
        "look": 0.5,
    }

    def __init__(self, random: Random) -> None:
        self.peers: dict[str, Peer] = {}
        self.copied: dict[tuple[str, int], Copied] = {}
        self.stores: dict[str, dict[str, SimulatedStore]] = {"a": {}, "b": {}}
        self.num_places = random.choice([1, 3, 10, 40, 200])
        self.place_bytes = random.choice([1, 6 << 20, 20 << 20])
        self.num_stored_states = random.choice([1, 2, 8, 40])
        self.now_s = 0.0
        self.all_workers: list[StoringWorker] = []
        super().__init__(random)

    def join(self) -> None:
        if not self.peers and not self.num_workers:
            self.capacity = replace(self.capacity, num_stages=1)
            others = OtherCells(self.core, {}, "s", lambda: None)
            cell = Cell(CONFIG, self.core, self.peers, others, lambda: None)
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
            if self.capacity.num_states is not None:
                own.num_states, own.state_bytes = self.num_stored_states, self.place_bytes
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
            assert self.cell.takes(peer, message, arrays)

    def left(self, before: set[str]) -> None:
        for worker_id in before - self.workers.keys():
            self.cell.on_detach(self.peers.pop(worker_id))
            for key in [each for each in self.copied if each[0] == worker_id]:
                del self.copied[key]
        held = [worker.own for worker in self.living]
        for stores in self.stores.values():
            for store in stores.values():
                store.is_locked = any(store is each for each in held)

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
        running = worker.running.values()
        if not any(each.is_isolated and each.allocated.is_held for each in running):
            super().check_plan(worker, planned, runnable)  # else a plan may just admit that one
        most = max(1, min(256, (16 << 20) // self.place_bytes))
        for kind, num_kinds in ((Load, 1), (Save, 2)):
            assert sum(type(each) is kind for each in planned.plan.rows) <= most * num_kinds
        slots = {row.slot for row in planned.plan.prefill}
        slots |= {row.slot for row in planned.plan.decode}
        assert not any(worker.running[slot].allocated.is_held for slot in slots)

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
            assert self.cell.takes(self.peers[worker_id], copied, [])

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
            store.damage(self.random)

    def break_store(self) -> None:
        if self.living:
            own = self.random.choice(self.living).own
            assert own is not None
            own.is_down = True

    def look(self) -> None:
        self.now_s += self.random.choice([1.0, 1000.0])
        self.cell.look(self.now_s)

    def check(self) -> None:
        super().check()
        for location in self.cell._locations.values():
            for store in location.stores.values():
                for part in store.parts:
                    self.check_part(store.owner, part)
        for stores in self.stores.values():
            for each in stores.values():
                for key, content in each.records.values():
                    if isinstance(content, list):
                        contexts = self.names[group_key(key, each.groups[key])]
                        assert content == contexts[-self.capacity.block_size :]
                    else:
                        contexts = self.names[state_key(key)]
                        assert content == (len(contexts), contexts[-1])

    def check_part(self, owner: object, part: Places) -> None:
        full = part.full.values()
        assert len({*full, *part._free}) == len(full) + len(part._free)
        if not isinstance(owner, StoreCopies):
            return
        sent = (each for each in owner._sent if not each.is_answered)
        saves = [place for each in sent for place in each.saves.values()]
        saving = [place for places, place in saves if places is part]
        assert len(full) + len(part._free) + len(saving) == part.num_places
        assert not {*saving} & {*full, *part._free}

    def finish(self) -> None:
        super().finish()
        for location in self.cell._locations.values():
            assert not location.saving
            assert not location.dropped
            parts = [part for store in location.stores.values() for part in store.parts]
            assert not any(part._pins for part in parts)
        for copies in self.cell._copies.values():
            assert not copies._to_load
            assert not copies._held
