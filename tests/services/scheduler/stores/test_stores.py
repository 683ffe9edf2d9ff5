"""Stores of a scheduler's workers: hits, losses, the least recently used place, and bad answers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from services.scheduler.scheduler import Planned
from services.scheduler.sequence import WaitReason
from services.scheduler.service import SchedulerService
from services.scheduler.stores.cell import MAX_KEPT, CellStores
from services.scheduler.stores.copies import StoreCopies
from services.scheduler.stores.index import Location, Places, Store
from services.scheduler.worker_state import LOADED_PART
from shared.errors import CodecError
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import (
    FIRST_STATE,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    STORES_MINOR,
    Attach,
    Capacity,
    Forget,
    Generate,
    Hello,
    Load,
    ModelInfo,
    NewSequence,
    ResultRow,
    SamplingParams,
    Save,
    StepPlan,
    StepResult,
    TokenRun,
)
from tests.mesh.arena_parts import NO_ARRAYS, FakePeer
from tests.services.scheduler.stores.storing_worker import SimulatedStore, StoringWorker

CAPACITY = Capacity(32, 4, 4, 16, 64, 1000)
MODEL = ModelInfo(["m"], "f", 1000, 64, 1)
PROMPT = np.arange(16, dtype=np.int32)
WITH_STATES = Capacity(60, 16, 4, 128, 1000, 1000, num_states=2)
LONG = np.arange(200, dtype=np.int32)
LOCATION = "here"


class Worker:
    """A peer of ``mesh`` with a ``store``, and maybe a ``disk``, and its simulation."""

    def __init__(
        self,
        mesh: "Mesh",
        name: str,
        store: SimulatedStore,
        capacity: Capacity = CAPACITY,
        disk: SimulatedStore | None = None,
    ) -> None:
        self.mesh = mesh
        mesh.stores[store.name] = store
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "worker", name, MODEL, capacity)
        self.peer = FakePeer(hello)
        disks = {} if disk is None else {disk.name: disk}
        self.simulated = StoringWorker(
            capacity, own=store, stores=mesh.stores, disk=disk, disks=disks
        )
        mesh.service.on_up(self.peer)
        mesh.service.on_message(self.peer, Attach(), [])
        for each in (store, *disks.values()):
            message, arrays = each.inventory(LOCATION)
            mesh.service.on_message(self.peer, message, arrays)

    @property
    def copies(self) -> StoreCopies:
        return self.mesh.cell._copies[self.peer]

    def use_disk(self) -> None:
        for jobs in (self.simulated.writes, self.simulated.reads):
            while jobs:
                if (message := jobs.popleft()()) is not None:
                    self.mesh.service.on_message(self.peer, message, [])

    def run(self, num: int = 100) -> list[StepPlan]:
        """Up to ``num`` plans, each with its answer."""
        plans: list[StepPlan] = []
        while len(plans) < num:
            self.mesh.service._plan()
            taken = self.peer.take(StepPlan)
            if not taken:
                break
            self.peer.got = [*taken[1:], *self.peer.got]
            plan, (ids, *_) = taken[0]
            plans.append(plan)
            self.answer(plan, ids)
        return plans

    def answer(self, plan: StepPlan, ids: np.ndarray) -> None:
        result, arrays = self.simulated.step(Planned(plan, ids))
        for each in self.simulated.answers:
            self.mesh.service.on_message(self.peer, each, [])
        self.simulated.answers.clear()
        self.mesh.service.on_message(self.peer, result, list(arrays))

    def die(self) -> None:
        self.mesh.service.on_down(self.peer, "it is killed")


class Mesh:
    def __init__(self, folder: Path, **settings: Any) -> None:
        config = SchedulerConfig(mesh_dir=folder, instance="s", **settings)
        self.service = SchedulerService(config)
        self.core = self.service._core
        self.stores: dict[str, SimulatedStore] = {}
        self.tokenizer = FakePeer(Hello(PROTOCOL_MAJOR, STORES_MINOR, "tokenizer", "t", MODEL))
        self.service.on_up(self.tokenizer)

    @property
    def cell(self) -> CellStores:
        (found,) = (each for each in self.service._extensions if isinstance(each, CellStores))
        return found

    def ask(self, name: str, prompt: np.ndarray = PROMPT, max_tokens: int = 4) -> None:
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        generate = Generate(f"{name}~1/0", 1, params, [NewSequence(f"{name}~1/0/0")])
        self.service.on_message(self.tokenizer, generate, [prompt, prompt[:0]])


def hybrid_store(name: str) -> SimulatedStore:
    return SimulatedStore(name, 60, 1, num_states=10, state_bytes=1)


def rows_of(plans: list[StepPlan], kind: type) -> list[Any]:
    return [row for plan in plans for row in plan.rows if isinstance(row, kind)]


def cached_of(plans: list[StepPlan]) -> list[int]:
    return [row.num_cached for plan in plans for row in plan.admit]


async def test_a_killed_workers_sequences_go_on_from_its_store(tmp_path: Path):
    mesh = Mesh(tmp_path)
    first = Worker(mesh, "one", SimulatedStore("one", 10, 1))
    mesh.ask("r", max_tokens=20)
    plans = first.run(num=8)
    assert rows_of(plans, Save)
    second = Worker(mesh, "two", SimulatedStore("two", 10, 1))
    first.die()
    (sequence,) = mesh.core.sequences.values()
    assert sequence.is_isolated
    plans = second.run()
    assert not mesh.core.sequences
    num_loaded = len(rows_of(plans, Load))
    assert num_loaded >= 4
    assert cached_of(plans) == [4 * num_loaded]
    assert {each.store for each in rows_of(plans, Load)} == {"one"}


async def test_an_idle_worker_saves_the_rest_and_its_next_process_has_it(tmp_path: Path):
    mesh = Mesh(tmp_path)
    store = SimulatedStore("one", 10, 20 << 20)  # one block a plan
    worker = Worker(mesh, "one", store)
    mesh.ask("r")
    plans = worker.run()
    assert len(rows_of(plans, Save)) == len(store.records) == 4
    assert max(len(each.rows) for each in plans) == 1
    worker.die()
    mesh = Mesh(tmp_path)
    worker = Worker(mesh, "one", store)
    mesh.ask("r")
    (state,), (sequence,) = mesh.core.workers.values(), mesh.core.sequences.values()
    assert state.has_cached(sequence, 12), "a short prompt by the store"
    assert not state.has_cached(sequence, 16)
    plans = worker.run()
    assert cached_of(plans) == [12], "the last id is computed"
    assert not rows_of(plans, Save), "the store has all of it"


async def test_a_lost_block_is_forgotten_and_its_sequence_computed(tmp_path: Path):
    mesh = Mesh(tmp_path)
    store = SimulatedStore("one", 10, 1)
    Worker(mesh, "one", store).run()
    mesh = Mesh(tmp_path)
    worker = Worker(mesh, "one", store)
    mesh.ask("r")
    worker.run()
    worker.die()
    worker = Worker(mesh, "two", store)
    del store.records[next(iter(store.records))]
    why: list[WaitReason] = []
    mesh.core.queues.on_return = lambda sequence, reason: why.append(reason)
    mesh.ask("s")
    plans = worker.run()
    assert why == [WaitReason.LOADING]
    assert cached_of(plans) == [12, 0]
    assert len(rows_of(plans, Forget)) == 1
    assert not mesh.core.sequences
    assert len(store.records) == 4, "it is saved again"


async def test_a_reset_of_the_prefix_cache_empties_stores(tmp_path: Path):
    mesh = Mesh(tmp_path)
    store = SimulatedStore("one", 10, 1)
    worker = Worker(mesh, "one", store)
    mesh.ask("r")
    worker.run()
    assert store.records
    mesh.service.commands()["reset_prefix_cache"]()
    worker.run()
    assert not store.records
    mesh.ask("s")
    assert cached_of(worker.run()) == [0]


async def test_blocks_of_a_broken_sequence_are_forgotten(tmp_path: Path):
    mesh = Mesh(tmp_path, pipeline_depth=1)
    store = SimulatedStore("one", 10, 1)
    worker = Worker(mesh, "one", store)
    mesh.ask("r", max_tokens=20)
    worker.run(num=4)
    assert store.records
    mesh.service._plan()
    ((plan, _),) = worker.peer.take(StepPlan)
    for copied in filter(None, [worker.simulated.copy(plan)]):
        mesh.service.on_message(worker.peer, copied, [])
    row = ResultRow(0, "r~1/0/0", 1, TokenRun(0), None, "numbers are not finite")
    mesh.service.on_message(worker.peer, StepResult(plan.step, [row]), NO_ARRAYS)
    worker.run()
    assert not store.records
    mesh.ask("s")
    assert cached_of(worker.run()) == [0]


async def test_blocks_that_a_worker_died_with_are_not_loaded_again(tmp_path: Path):
    mesh = Mesh(tmp_path)
    store = SimulatedStore("one", 10, 1)
    worker = Worker(mesh, "one", store)
    mesh.ask("r")
    worker.run()
    worker.die()
    worker = Worker(mesh, "two", store)
    mesh.ask("s")
    mesh.service._plan()
    mesh.service._plan()
    assert rows_of([each for each, _ in worker.peer.take(StepPlan)], Load)
    worker.die()
    (sequence,) = mesh.core.sequences.values()
    assert not sequence.is_isolated, "it was not computed"
    worker = Worker(mesh, "three", store)
    assert cached_of(worker.run()) == [0]


async def test_a_result_without_its_copies_is_no_message(tmp_path: Path):
    mesh = Mesh(tmp_path)
    worker = Worker(mesh, "one", SimulatedStore("one", 10, 1))
    mesh.ask("r", max_tokens=0)
    worker.run(num=1)
    mesh.service._plan()
    ((plan, _),) = worker.peer.take(StepPlan)
    assert rows_of([plan], Save)
    with pytest.raises(CodecError, match="no Copied"):
        mesh.service.on_message(worker.peer, StepResult(plan.step, []), NO_ARRAYS)


async def test_a_store_of_a_worker_with_stages_is_no_message(tmp_path: Path):
    capacity = replace(CAPACITY, num_stages=2)
    with pytest.raises(CodecError, match="a store of a worker with 2 stages"):
        Worker(Mesh(tmp_path), "one", SimulatedStore("one", 10, 1), capacity)


async def test_a_store_has_states_if_its_worker_has(tmp_path: Path):
    for store, capacity in (
        (SimulatedStore("one", 10, 1), WITH_STATES),
        (hybrid_store("one"), CAPACITY),
    ):
        with pytest.raises(CodecError, match="places for states; the worker has"):
            Worker(Mesh(tmp_path), "one", store, capacity)


async def test_a_killed_workers_hybrid_goes_on_from_its_last_keep_point(tmp_path: Path):
    """The state stays on the next worker, for later sequences."""
    mesh = Mesh(tmp_path)
    first = Worker(mesh, "one", hybrid_store("one"), WITH_STATES)
    mesh.ask("r", LONG, max_tokens=20)
    first.run(num=8)
    second = Worker(mesh, "two", hybrid_store("two"), WITH_STATES)
    first.die()
    plans = second.run()
    assert not mesh.core.sequences
    assert cached_of(plans) == [192]
    assert [row.slot for row in rows_of(plans, Load)] == [*[None] * 12, 0]
    mesh.ask("s", LONG)
    plans = second.run()
    assert cached_of(plans) == [192]
    assert not rows_of(plans, Load)


async def test_blocks_in_the_cache_lack_the_state_alone(tmp_path: Path):
    mesh = Mesh(tmp_path)
    worker = Worker(mesh, "one", hybrid_store("one"), WITH_STATES)
    for name, prompt in (("r", LONG), ("q", LONG + 1)):
        mesh.ask(name, prompt)
        worker.run()
    mesh.ask("s", LONG)
    plans = worker.run()
    assert cached_of(plans) == [192]
    assert [row.slot for row in rows_of(plans, Load)] == [0]
    (state,) = mesh.core.workers.values()
    assert state.pool.num_owned == 0


async def test_a_hit_that_goes_on_in_a_store_is_not_cut(tmp_path: Path):
    """The worker has the first blocks without a state, the store has more, and a state."""
    mesh = Mesh(tmp_path)
    store = hybrid_store("one")
    worker = Worker(mesh, "one", store, WITH_STATES)
    mesh.ask("r", LONG)
    worker.run()
    worker.die()
    worker = Worker(mesh, "two", store, WITH_STATES)
    for name, prompt in (("q", LONG[:140]), ("e", LONG + 1)):
        mesh.ask(name, prompt)
        worker.run()
    num_cut = mesh.core.num_prefix_cut
    mesh.ask("s", LONG)
    plans = worker.run()
    assert cached_of(plans) == [192]
    assert [row.slot for row in rows_of(plans, Load)] == [*[None] * 4, 0]
    assert mesh.core.num_prefix_cut == num_cut


async def test_a_lost_state_is_forgotten_and_its_sequence_computed(tmp_path: Path):
    mesh = Mesh(tmp_path)
    store = hybrid_store("one")
    worker = Worker(mesh, "one", store, WITH_STATES)
    mesh.ask("r", LONG)
    worker.run()
    worker.die()
    worker = Worker(mesh, "two", store, WITH_STATES)
    for place in [each for each in store.records if each >= FIRST_STATE]:
        del store.records[place]
    mesh.ask("s", LONG)
    plans = worker.run()
    assert cached_of(plans) == [192, 0]
    assert not mesh.core.sequences
    assert any(each >= FIRST_STATE for each in store.records), "it is saved again"


async def test_no_state_is_loaded_without_a_copy_for_it(tmp_path: Path):
    mesh = Mesh(tmp_path)
    store = hybrid_store("one")
    worker = Worker(mesh, "one", store, WITH_STATES)
    mesh.ask("r", LONG)
    worker.run()
    worker.die()
    worker = Worker(mesh, "two", store, replace(WITH_STATES, num_states=0))
    mesh.ask("s", LONG)
    assert cached_of(worker.run()) == [0]


async def test_a_state_counts_as_cached_if_a_copy_may_be_free_for_it(tmp_path: Path):
    """Not while all copies belong to running sequences."""
    mesh = Mesh(tmp_path)
    store = hybrid_store("one")
    worker = Worker(mesh, "one", store, WITH_STATES)
    mesh.ask("r", LONG)
    worker.run()
    worker.die()
    worker = Worker(mesh, "two", store, replace(WITH_STATES, num_states=1))
    mesh.ask("q", LONG[:20] + 1, max_tokens=40)
    worker.run(num=3)
    mesh.ask("s", LONG)
    (state,) = mesh.core.workers.values()
    sequence = mesh.core.sequences["s~1/0/0", 1]
    assert state.num_cached(sequence) == 0
    mesh.core.cancel(("q~1/0/0", 1))
    assert cached_of(worker.run()) == [0]
    mesh.ask("t", LONG)
    assert state.num_cached(mesh.core.sequences["t~1/0/0", 1]) == LOADED_PART * 192


async def test_stores_without_owners_are_dropped_in_time(tmp_path: Path):
    mesh = Mesh(tmp_path)
    for number in range(MAX_KEPT + 3):
        Worker(mesh, f"w{number}", SimulatedStore(f"s{number}", 1, 1)).die()
    mesh.cell.look(0.0)
    (location,) = mesh.cell._memory.values()
    assert len(location.stores) == MAX_KEPT
    mesh.cell.look(1e6)
    assert not mesh.cell._memory


def key(number: int) -> bytes:
    return bytes([number]) * 16


def test_the_place_used_least_recently_is_overwritten_unless_it_is_pinned():
    places = Places(3, 1, {key(0): 2, key(1): 0})
    assert places.take() == 1
    places.put(key(2), 1)
    places.use(key(0))
    places.pin(key(1))
    assert places.take() == 1
    places.put(key(3), 1)
    places.unpin(key(1))
    assert places.take() == 0
    assert places.full == {key(0): 2, key(3): 1}


def test_a_forgotten_place_is_free_and_told_unless_it_is_overwritten():
    places = Places(2, 1, {key(0): 0, key(1): 1})
    location = Location()
    location.stores["s"] = Store("s", [places])
    location.forget(key(1))
    assert [*places.forgets] == [1]
    assert places.take() == 1
    assert not places.forgets
    location.forget_all()
    assert [*places.forgets] == [0]
