"""Random schedules of workers with stores, which outlive the workers."""

from functools import partial
from pathlib import Path
from random import Random
from typing import ClassVar
from unittest.mock import patch

from msgspec.structs import replace

from services.scheduler.extension import Cell, OtherCells
from services.scheduler.scheduler import Planned
from services.scheduler.sequence import Sequence
from services.scheduler.stores.cell import CellStores
from services.scheduler.stores.copies import StoreCopies
from services.scheduler.stores.disk import DiskCopies
from services.scheduler.stores.index import Location, Places, group_key, state_key
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
from tests.services.scheduler.schedules import SHARED, WEIGHTS, Mesh
from tests.services.scheduler.stores.storing_worker import (
    Content,
    SimulatedStore,
    StoringWorker,
)

CONFIG = SchedulerConfig(mesh_dir=Path("/nonexistent"), instance="s")
CHATS = [[(11 * chat + i) % 50 for i in range(36)] for chat in range(6)]
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
        "do_disk_job": 6,
        "break_disk": 0.2,
    }

    def __init__(self, random: Random) -> None:
        self.peers: dict[str, Peer] = {}
        self.copied: dict[tuple[str, int], Copied] = {}
        self.stores: dict[str, dict[str, SimulatedStore]] = {"a": {}, "b": {}}
        self.disks: dict[str, SimulatedStore] = {}
        self.num_places_on_disk = random.choice([0, 2, 30, 500, 500])
        self.num_places = random.choice([1, 3, 3, 10, 10, 40, 200])
        self.place_bytes = random.choice([1, 6 << 20, 20 << 20])
        self.num_stored_states = random.choice([1, 2, 8, 40])
        self.now_s = 0.0
        self.all_workers: list[StoringWorker] = []
        self.forgotten: list[tuple[bytes, Content]] = []  # records of stores
        super().__init__(random)

    def arrive(self) -> None:
        """Often in one of a few chats, whose blocks come and go."""
        shared = self.random.choice([SHARED, CHATS, CHATS])
        with patch("tests.services.scheduler.schedules.SHARED", shared):
            super().arrive()

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
            own = stores[name] = self.store_of(name, self.num_places)
        own.is_locked, own.is_down = True, False
        disk = next((each for each in self.disks.values() if not each.is_locked), None)
        if disk is None and self.num_places_on_disk:
            name = f"disk {len(self.disks)}"
            disk = self.disks[name] = self.store_of(name, self.num_places_on_disk)
            disk.is_disk = True
        if disk is not None:
            disk.is_locked, disk.is_down = True, False
        worker = StoringWorker(
            plain.capacity,
            plain.stop,
            is_fast=plain.is_fast,
            repeats=plain.repeats,
            own=own,
            stores=stores,
            disk=disk,
            disks=self.disks,
            byte_s=self.random.choice([0, 1, 30]) / self.place_bytes,
        )
        self.workers[worker_id] = worker
        self.all_workers.append(worker)
        peer = self.peers[worker_id] = connect("worker", MODEL, plain.capacity, worker_id)
        if self.random.random() < 0.9:
            message, arrays = own.inventory(location)
            assert self.cell.takes(peer, message, arrays)
            if disk is not None:
                worker.writes.append(partial(self.tell_of_disk, disk, peer))

    def store_of(self, name: str, num_places: int) -> SimulatedStore:
        made = SimulatedStore(name, num_places, self.place_bytes)
        if self.capacity.num_states is not None:
            made.num_states, made.state_bytes = self.num_stored_states, self.place_bytes
        return made

    def tell_of_disk(self, disk: SimulatedStore, peer: Peer) -> None:
        message, arrays = disk.inventory("the disk")
        assert self.cell.takes(peer, message, arrays)

    def left(self, before: set[str]) -> None:
        for worker_id in before - self.workers.keys():
            self.cell.on_detach(self.peers.pop(worker_id))
            for key in [each for each in self.copied if each[0] == worker_id]:
                del self.copied[key]
        held = [store for worker in self.living for store in (worker.own, worker.disk)]
        for stores in (*self.stores.values(), self.disks):
            for store in stores.values():
                store.is_locked = any(store is each for each in held)

    @property
    def locations(self) -> list[Location]:
        return [*self.cell._memory.values(), *self.cell._disks.values()]

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
        if not self.core.sequences or self.random.random() < 0.3:
            self.do_disk_job()
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
        self.forgotten += [each for file in self.files for each in file.records.values()]
        for sequence in self.core.queues:
            assert not any(each.num_cached(sequence) for each in self.core.workers.values())

    def do_disk_job(self) -> None:
        if self.peers:
            worker_id = self.random.choice(sorted(self.peers))
            self.do_disk_job_of(worker_id, self.random.random() < 0.5)

    def do_disk_job_of(self, worker_id: str, is_read: bool) -> None:
        worker = self.workers[worker_id]
        assert isinstance(worker, StoringWorker)
        jobs = worker.reads if is_read else worker.writes
        if jobs and (message := jobs.popleft()()) is not None:
            assert self.cell.takes(self.peers[worker_id], message, [])

    def do_all_disk_jobs(self) -> None:
        for worker_id in self.peers:
            worker = self.workers[worker_id]
            while isinstance(worker, StoringWorker) and (worker.reads or worker.writes):
                self.do_disk_job_of(worker_id, bool(worker.reads))

    def break_disk(self) -> None:
        for each in self.disks.values():
            each.is_down = self.random.random() < 0.5

    def lose_records(self) -> None:
        for stores in (*self.stores.values(), self.disks):
            for store in stores.values():
                store.damage(self.random)

    def break_store(self) -> None:
        if self.living:
            own = self.random.choice(self.living).own
            assert own is not None
            own.is_down = True

    def look(self) -> None:
        self.now_s += self.random.choice([1.0, 1000.0])
        self.cell.look(self.now_s)
        known = {name for location in self.locations for name in location.stores}
        dropped = [file for file in self.files if file.name not in known]
        back = {id(each) for file in dropped for each in file.records.values()}
        self.forgotten = [each for each in self.forgotten if id(each) not in back]

    @property
    def files(self) -> list[SimulatedStore]:
        places = (*self.stores.values(), self.disks)
        return [each for stores in places for each in stores.values()]

    def check(self) -> None:
        super().check()
        files = {each.name: each for each in self.files}
        for location in self.locations:
            for store in location.stores.values():
                for part in store.parts:
                    self.check_part(store.owner, part)
                    self.check_forgotten(part, files[store.name])
        for stores in (*self.stores.values(), self.disks):
            for each in stores.values():
                for key, content in each.records.values():
                    if isinstance(content, list):
                        contexts = self.names[group_key(key, each.groups[key])]
                        assert content == contexts[-self.capacity.block_size :]
                    else:
                        contexts = self.names[state_key(key)]
                        assert content == (len(contexts), contexts[-1])

    def check_forgotten(self, part: Places, file: SimulatedStore) -> None:
        found = [file.records.get(part.first + place) for place in part.full.values()]
        assert not {*map(id, self.forgotten)} & {*map(id, found)}, "a forgotten place came back"

    def check_part(self, owner: object, part: Places) -> None:
        full = part.full.values()
        assert len({*full, *part._free}) == len(full) + len(part._free)
        if isinstance(owner, StoreCopies):
            sent = [each for each in owner._sent if not each.is_answered]
            saves = [place for each in sent for place in each.saves.values()]
        elif isinstance(owner, DiskCopies):
            saves = [place for each in owner._spilling for place in each.saves.values()]
        else:
            return
        saving = [place for places, place in saves if places is part]
        assert len(full) + len(part._free) + len(saving) == part.num_places
        assert not {*saving} & {*full, *part._free}

    def finish(self) -> None:
        super().finish()
        for _ in range(3):  # spills may follow loads, which follow fetches
            self.do_all_disk_jobs()
            self.plan()
            for worker_id in [*self.results]:
                while self.results.get(worker_id):
                    self.absorb_from(worker_id)
        self.do_all_disk_jobs()
        for location in self.locations:
            assert not location.saving
            assert not location.dropped
            parts = [part for store in location.stores.values() for part in store.parts]
            assert not any(part._pins for part in parts)
        for each in self.living:
            assert not any(each.held.values()), "fetched places that nobody loads"
        for copies in self.cell._copies.values():
            assert not copies._to_load
            assert not copies._held
            if copies.disk is not None:
                assert not copies.disk._num_fetched_bytes
                assert not copies.disk.num_awaited
                assert not copies.disk._num_spilled_bytes


class ChatMesh(StoreMesh):
    """Chats whose turns go on after others took their blocks, and their places in memory."""

    weights: ClassVar[dict[str, float]] = {
        "arrive": 9,
        "run": 9,
        "do_disk_job": 9,
        "lose_records": 0.5,
        "kill_worker": 0.5,
        "reset_prefix_cache": 0.2,
        "cancel": 0.5,
    }

    def join(self) -> None:
        if not self.num_workers:
            self.capacity = replace(self.capacity, num_blocks=24, block_size=4)
            self.num_places = self.random.choice([6, 12, 24])
            self.num_places_on_disk = 100
        super().join()
