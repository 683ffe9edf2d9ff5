"""A worker's end of the link: inventories, reports, and checks of plans."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.harness.engines import make_engine
from services.worker.extension import WorkerCore
from services.worker.step_thread import StepThread
from services.worker.stores.extension import WorkerStores
from shared.errors import CodecError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    FIRST_STATE,
    PROTOCOL_MAJOR,
    STORED_STATES_MINOR,
    STORED_WINDOWS_MINOR,
    STORES_MINOR,
    Admit,
    Copied,
    Decode,
    Forget,
    Group,
    Hello,
    Inventory,
    Load,
    Prefill,
    SamplingParams,
    Save,
    StepPlan,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.worker import StoreWorker, key_of


def scheduler(minor: int = STORES_MINOR) -> FakePeer:
    return FakePeer(Hello(PROTOCOL_MAJOR, minor, "scheduler", "s"))


def plan_of(
    *rows: Any,
    step: int = 1,
    release: Sequence[int] = (),
    admits: Sequence[Admit] = (),
    prefill: Sequence[Prefill] = (),
    decode: Sequence[Decode] = (),
) -> StepPlan:
    return StepPlan(step, [*release], [*admits], [], [*prefill], [*decode], rows=[*rows])


class Worker:
    """An extension with an engine, attached to ``home``."""

    def __init__(self, engine: Any) -> None:
        self.home: Any = scheduler()
        self.step_thread = StepThread()
        core = WorkerCore(WorkerConfig(), engine, self.step_thread, list, lambda: self.home)
        self.stores = WorkerStores(core)

    def run(self, engine: Any, plan: StepPlan) -> None:
        """As the service does."""
        self.stores.check(plan, [])
        self.step_thread.submit(engine._plan_parts[-1].apply, plan, [])

    async def settle(self) -> None:
        await asyncio.wrap_future(self.step_thread.executor.submit(lambda: None))
        await asyncio.sleep(0)


@pytest.fixture
async def both(checkpoint: Path, tmp_path: Path) -> AsyncIterator[tuple[Worker, StoreWorker]]:
    computing = StoreWorker(checkpoint, tmp_path)
    computing.generate(random_ids(37, 150), [0, 1, 2, 3, 4])
    worker = Worker(computing.engine)
    yield worker, computing
    worker.stores.close()
    worker.step_thread.executor.shutdown()


async def test_an_inventory_follows_each_attach(both: tuple[Worker, StoreWorker]) -> None:
    """It has the saves of earlier plans."""
    worker, computing = both
    saved = plan_of(Save(key_of(0), 0, 3), Save(key_of(1), 1, 1), Save(key_of(2), 1, 2), Forget(2))
    worker.run(computing.engine, saved)
    worker.stores.on_attach(worker.home)
    await worker.settle()
    ((message, (keys, places)),) = worker.home.take(Inventory)
    header = computing.part.own.header
    assert (message.store, message.num_places) == (computing.store, header.num_places)
    assert message.place_bytes == computing.block_bytes
    assert message.location == computing.part.location
    assert keys.tobytes() == key_of(0) + key_of(1)
    assert (places.dtype, places.tolist()) == (np.int32, [3, 1])


async def test_old_and_lost_schedulers_get_no_inventory(both: tuple[Worker, StoreWorker]) -> None:
    worker, computing = both
    old, lost = scheduler(STORES_MINOR - 1), worker.home
    worker.run(computing.engine, plan_of(Save(key_of(0), 0, 0)))
    worker.stores.on_attach(old)
    worker.stores.on_attach(lost)
    worker.home = old
    await worker.settle()
    assert not old.take(Inventory)
    assert not lost.take(Inventory)


async def test_the_sender_of_a_plan_gets_its_report(both: tuple[Worker, StoreWorker]) -> None:
    """Unless the worker has left it. A plan that copies no block has none."""
    worker, computing = both
    first = worker.home
    worker.run(computing.engine, plan_of(Save(key_of(0), 0, 0)))
    worker.run(computing.engine, plan_of(Forget(9)))
    worker.run(computing.engine, plan_of())
    await worker.settle()
    worker.run(computing.engine, plan_of(Save(key_of(2), 2, 2)))
    worker.home = scheduler()
    lost = Load(key_of(5), 7, computing.store, 5)
    worker.run(computing.engine, plan_of(Load(key_of(0), 6, computing.store, 0), lost, step=2))
    await worker.settle()
    ((report, _),) = first.take(Copied)
    assert report == Copied(1)
    ((report, _),) = worker.home.take(Copied)
    assert (report.step, report.lost) == (2, [key_of(5)])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Save(key_of(0), 64, 0), "block 64 for a store; the cache has 64"),
        (Load(key_of(0), 2**31 - 1, "s", 0), "block 2147483647 for a store"),
        (Save(key_of(0), 0, 2**31 - 1), "place 2147483647 of a store"),
        (Forget(100_000), "place 100000 of a store with"),
        (Load(key_of(0), 0, "s", 0, slot=0), "state 0 from a store for slot 0, which awaits none"),
    ],
)
async def test_hostile_rows(both: tuple[Worker, StoreWorker], row: Any, why: str) -> None:
    with pytest.raises(CodecError, match=why):
        both[0].stores.check(plan_of(row), [])


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("hybrid") / "model"
    save_hybrid(model, "qwen3.5")
    return model


async def test_a_store_of_states_is_told_to_schedulers_that_know_them(
    hybrid: Path, tmp_path: Path
) -> None:
    """Places of states have numbers of their own."""
    computing = StoreWorker(hybrid, tmp_path)
    worker, header = Worker(computing.engine), computing.part.own.header
    state = Save(key_of(7), 0, FIRST_STATE + 1)
    worker.run(computing.engine, plan_of(Save(key_of(0), 0, 3), state))
    worker.home = scheduler(STORED_STATES_MINOR - 1)
    worker.stores.on_attach(worker.home)
    await worker.settle()
    assert not worker.home.take(Inventory)
    worker.home = scheduler(STORED_STATES_MINOR)
    worker.stores.on_attach(worker.home)
    await worker.settle()
    ((message, (keys, places)),) = worker.home.take(Inventory)
    assert (message.num_states, message.state_bytes) == (header.num_states, header.state_bytes)
    assert header.num_states > 1
    assert keys.tobytes() == key_of(0) + key_of(7)
    assert places.tolist() == [3, FIRST_STATE + 1]
    for row, why in (
        (Save(key_of(0), 10**6, FIRST_STATE), "state 1000000 for a store"),
        (Load(key_of(0), 10**6, "s", 0, 0), "state 1000000 from a store for slot 0"),
        (Load(key_of(0), 0, "s", 0, 10**6), "state 0 from a store for slot 1000000"),
        (Forget(FIRST_STATE + header.num_states), "of a store with"),
    ):
        with pytest.raises(CodecError, match=why):
            worker.stores.check(plan_of(row), [])
    worker.stores.close()
    worker.step_thread.executor.shutdown()


async def test_a_store_of_windows_is_told_to_schedulers_that_take_it(
    both: tuple[Worker, StoreWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, computing = both
    capacity = replace(computing.engine.capacity, groups=(Group(), Group(8)))
    monkeypatch.setattr(computing.engine, "capacity", capacity)
    for minor, num in ((STORED_WINDOWS_MINOR - 1, 0), (STORED_WINDOWS_MINOR, 1)):
        worker.home = scheduler(minor)
        worker.stores.on_attach(worker.home)
        await worker.settle()
        assert len(worker.home.take(Inventory)) == num


async def test_a_state_is_loaded_for_the_slot_that_awaits_it(hybrid: Path, tmp_path: Path) -> None:
    """Other slots and copies may belong to other sequences."""
    computing = StoreWorker(hybrid, tmp_path)
    worker = Worker(computing.engine)
    check = partial(worker.stores.check, pixels=[])
    load, other = (Load(key_of(0), copy, "s", FIRST_STATE, 1) for copy in (2, 3))
    for begun in (
        plan_of(),
        plan_of(admits=[admit(1, None, 2)]),  # it computes from its first id on
        plan_of(admits=[admit(1, 0, 2)]),  # from a state of the cache
        plan_of(admits=[admit(0, 2, 2)]),
    ):
        check(begun)
        with pytest.raises(CodecError, match="state 2 from a store for slot 1, which awaits none"):
            check(plan_of(load))
    check(plan_of(admits=[admit(1, 2, 2)]))
    with pytest.raises(CodecError, match="state 3 from a store for slot 1, which awaits state 2"):
        check(plan_of(other))
    check(plan_of(load))
    for end in (
        lambda: check(plan_of(decode=[Decode(1)])),
        lambda: check(plan_of(prefill=[Prefill(1, 3)])),
        lambda: check(plan_of(release=[1])),
        worker.stores.clear,
    ):
        check(plan_of(admits=[admit(1, 2, 2)]))
        end()
        with pytest.raises(CodecError, match="which awaits none"):
            check(plan_of(load))
    worker.stores.close()
    worker.step_thread.executor.shutdown()


def admit(slot: int, from_state: int | None, to_state: int) -> Admit:
    row = Admit(slot, "r", 1, 0, 0, 99, 99, 64, SamplingParams(seed=0), [0])
    return replace(row, from_state=from_state, to_state=to_state)


async def test_places_far_outside_other_stores_are_lost(both: tuple[Worker, StoreWorker]) -> None:
    worker, computing = both
    names = (computing.store, "../../etc", "x" * 256)
    rows = [Load(key_of(0), 6, store, 2**31 - 1) for store in names]
    worker.run(computing.engine, plan_of(*rows))
    await worker.settle()
    ((report, _),) = worker.home.take(Copied)
    assert report.lost == 3 * [key_of(0)]


async def test_a_worker_without_a_store_takes_no_rows(checkpoint: Path) -> None:
    worker = Worker(make_engine(checkpoint, "native"))
    worker.stores.on_attach(worker.home)
    worker.stores.check(plan_of(), [])
    with pytest.raises(CodecError, match="no KV store"):
        worker.stores.check(plan_of(Forget(0)), [])
    await worker.settle()
    assert not worker.home.take(Inventory)
    worker.stores.close()
    worker.step_thread.executor.shutdown()
