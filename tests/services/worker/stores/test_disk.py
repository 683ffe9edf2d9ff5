"""A store on a disk below the one in memory: its copies, its faults, and its end of the link."""

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.worker.stores import disk as disks
from services.worker.stores.folder import BLOCKS
from services.worker.stores.places import OwnPlaces
from shared.errors import CodecError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    DISK_STORES_MINOR,
    Copied,
    Fetch,
    Fetched,
    Forget,
    Inventory,
    Load,
    Save,
    Spill,
    Spilled,
    Unfetch,
)
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.test_extension import Worker, plan_of, scheduler
from tests.services.worker.stores.worker import SIZE, StoreWorker, key_of

IDS = random_ids(37, 150)
BLOCKS_OF_IDS = [0, 1, 2, 3, 4]


class DiskWorker(Worker):
    """With two blocks saved in memory, and a disk."""

    def __init__(self, model: Path, folder: Path) -> None:
        sizes: dict[str, Any] = {"kv_disk_size": SIZE, "kv_disk_dir": folder / "disk"}
        self.computing = StoreWorker(model, folder / "memory", **sizes)
        self.text = self.computing.generate(IDS, BLOCKS_OF_IDS)
        super().__init__(self.computing.engine)
        self.home = scheduler(DISK_STORES_MINOR)
        self.step = 0
        self.apply(Save(key_of(0), 0, 0), Save(key_of(1), 1, 1))

    @property
    def disk(self) -> Any:
        return self.computing.part.disk

    @property
    def name(self) -> str:
        name: str = self.disk.header.id
        return name

    def apply(self, *rows: Any) -> None:
        self.step += 1
        self.run(self.computing.engine, plan_of(*rows, step=self.step))

    async def answer(self, kind: type) -> Any:
        async with asyncio.timeout(20):
            while not (found := self.home.take(kind)):
                await asyncio.sleep(0.01)
        ((message, _),) = found
        return message

    async def spill(self) -> Spilled:
        """Both blocks, to the places 5 and 6."""
        self.apply(Spill(key_of(0), 0, 5), Spill(key_of(1), 1, 6))
        message: Spilled = await self.answer(Spilled)
        return message

    async def fetch(self) -> Fetched:
        self.apply(Fetch(key_of(0), self.name, 5), Fetch(key_of(1), self.name, 6))
        message: Fetched = await self.answer(Fetched)
        return message

    def load(self, *blocks: int) -> None:
        rows = (
            Load(key_of(number), each, self.name, 5 + number, is_fetched=True)
            for number, each in enumerate(blocks)
        )
        self.apply(*rows)

    def close(self) -> None:
        self.stores.close()
        self.step_thread.executor.shutdown()


@pytest.fixture
async def worker(checkpoint: Path, tmp_path: Path) -> AsyncIterator[DiskWorker]:
    worker = DiskWorker(checkpoint, tmp_path)
    await worker.answer(Copied)
    yield worker
    worker.close()


def lost(why: str) -> float:
    return REGISTRY.get_sample_value("shoal_kv_store_lost_total", {"reason": why}) or 0.0


def is_up(worker: DiskWorker) -> bool:
    return REGISTRY.get_sample_value("shoal_kv_store_up", {"store": worker.name}) == 1


async def test_blocks_go_to_the_disk_and_come_back(worker: DiskWorker) -> None:
    """A place in memory may be overwritten by the plan that spills it."""
    worker.apply(Spill(key_of(0), 0, 5), Spill(key_of(1), 1, 6), Save(key_of(9), 2, 0))
    assert await worker.answer(Spilled) == Spilled(worker.step)
    await worker.answer(Copied)
    fetched = await worker.fetch()
    assert (fetched.step, fetched.lost) == (worker.step, [])
    worker.load(6, 7)
    assert (await worker.answer(Copied)).lost == []
    blocks, computing = [6, 7, 8, 9, 10], worker.computing
    assert computing.bytes_of(6) == computing.bytes_of(0)
    assert computing.generate(IDS, blocks, num_cached=32) == worker.text


async def test_a_block_is_fetched_for_each_load(worker: DiskWorker) -> None:
    await worker.spill()
    await worker.fetch()
    worker.apply(Unfetch(key_of(0)), Unfetch(key_of(1)))
    with pytest.raises(CodecError, match="-1 places fetched"):
        worker.load(6)
    assert worker.disk.take(key_of(0)) is None


async def test_a_disk_outlives_its_worker(checkpoint: Path, tmp_path: Path) -> None:
    """Its inventory follows the one of memory, after all copies."""
    worker = DiskWorker(checkpoint, tmp_path)
    await worker.answer(Copied)
    await worker.spill()
    worker.apply(Forget(5, is_on_disk=True))
    worker.close()
    successor = DiskWorker(checkpoint, tmp_path)
    await successor.answer(Copied)
    successor.apply(Spill(key_of(0), 0, 7))
    for minor, num in ((DISK_STORES_MINOR - 1, 1), (DISK_STORES_MINOR, 2)):
        successor.home = scheduler(minor)
        successor.stores.on_attach(successor.home)
        async with asyncio.timeout(20):
            found: list[Any] = []
            while len(found) < num:
                found += successor.home.take(Inventory)
                await asyncio.sleep(0.01)
        assert [message.is_on_disk for message, _ in found] == [False, True][:num]
    message, (keys, places) = found[1]
    assert message.store == worker.name == successor.name
    assert keys.tobytes() == key_of(1) + key_of(0)
    assert places.tolist() == [6, 7]
    successor.close()


async def test_the_lost_scheduler_gets_no_answer(worker: DiskWorker) -> None:
    first = worker.home
    await worker.spill()
    worker.apply(Fetch(key_of(0), worker.name, 5), Spill(key_of(0), 0, 7))
    worker.stores.clear()
    worker.home = scheduler(DISK_STORES_MINOR)
    assert (await worker.fetch()).lost == []
    assert not first.take(Fetched)
    worker.load(6, 7)
    await worker.answer(Copied)
    assert worker.disk.take(key_of(0)) is None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_disk_that_cannot_be_written_takes_no_more(
    worker: DiskWorker, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.spill()

    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(OwnPlaces, "save", fail)
    worker.apply(Spill(key_of(0), 0, 7))
    assert await worker.answer(Spilled) == Spilled(worker.step, [key_of(0)], is_down=True)
    monkeypatch.undo()
    worker.apply(Spill(key_of(0), 0, 7))
    assert (await worker.answer(Spilled)).is_down
    assert not is_up(worker)
    assert (await worker.fetch()).lost == []


@pytest.mark.parametrize("is_read", [False, True])
async def test_a_disk_that_does_not_answer_is_given_up(
    worker: DiskWorker, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps go on meanwhile, and its late answers count no more."""
    await worker.spill()
    stuck, goes_on = threading.Event(), threading.Event()

    def wait(*_: Any, **__: Any) -> Any:
        stuck.set()
        goes_on.wait(20)

    monkeypatch.setattr(OwnPlaces, "load" if is_read else "save", wait)
    worker.apply(Spill(key_of(0), 0, 7), Fetch(key_of(0), worker.name, 5))
    await asyncio.to_thread(stuck.wait, 20)
    assert worker.computing.generate(IDS, BLOCKS_OF_IDS) == worker.text
    begun_s = next(each._open[0].begun_s for each in worker.disk._threads if each._open)
    worker.disk.look(begun_s + 0.9 * disks.STALL_S)
    assert is_up(worker)
    worker.disk.look(begun_s + 1.1 * disks.STALL_S)
    assert not is_up(worker)
    spilled = await worker.answer(Spilled)
    assert spilled.is_down or is_read  # the other thread may have been done
    await worker.answer(Fetched)
    assert (await worker.fetch()).lost == [key_of(0), key_of(1)]
    goes_on.set()
    worker.apply(Spill(key_of(1), 1, 8))
    assert (await worker.answer(Spilled)).is_down


async def test_damaged_places_are_lost(worker: DiskWorker, tmp_path: Path) -> None:
    """In memory before they are spilled, or on the disk."""
    size = worker.disk.header.place_bytes
    before = lost("damaged")
    (memory,) = (tmp_path / "memory").glob(f"*/0/{BLOCKS}")
    with memory.open("r+b") as stream:
        stream.seek(size + 11)
        stream.write(b"\x5a\xa5")
    assert (await worker.spill()).unsaved == [key_of(1)]
    (below,) = (tmp_path / "disk").glob(f"*/0/{BLOCKS}")
    with below.open("r+b") as stream:
        stream.seek(5 * size + 11)
        stream.write(b"\x5a\xa5")
    assert (await worker.fetch()).lost == [key_of(0), key_of(1)]
    assert lost("damaged") == before + 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (Spill(key_of(0), 100_000, 0), "place 100000 of a store"),
        (Spill(key_of(0), 0, 100_000), "place 100000 of a store"),
        (Forget(100_000, is_on_disk=True), "place 100000 of a store"),
        (Unfetch(key_of(0)), "-1 places fetched"),
        (Load(key_of(0), 0, "s", 0, is_fetched=True), "-1 places fetched"),
    ],
)
async def test_hostile_rows(worker: DiskWorker, row: Any, why: str) -> None:
    with pytest.raises(CodecError, match=why):
        worker.stores.check(plan_of(row), [])


async def test_memory_for_copies_under_way_is_limited(worker: DiskWorker) -> None:
    most = worker.stores._disk._most
    fetch, spill = Fetch(key_of(0), "s", 0), Spill(key_of(0), 0, 0)
    for row, why in ((fetch, f"{most + 1} places fetched"), (spill, f"{most + 1} spilled")):
        with pytest.raises(CodecError, match=why):
            worker.stores.check(plan_of(*(most + 1) * [row]), [])
        worker.stores.clear()


async def test_rows_for_a_disk_that_is_not_there(checkpoint: Path, tmp_path: Path) -> None:
    worker = Worker(StoreWorker(checkpoint, tmp_path).engine)
    with pytest.raises(CodecError, match="no KV store on a disk"):
        worker.stores.check(plan_of(Fetch(key_of(0), "s", 0)), [])
    worker.stores.close()
    worker.step_thread.executor.shutdown()


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"kv_offloading_size": 1, "kv_disk_size": 1}, "kv-disk-size: 1 GiB need a kv-disk-dir"),
        ({"kv_disk_size": 2, "kv_disk_dir": "/d"}, "kv-disk-size: 2 GiB need a store in memory"),
    ],
)
def test_settings_without_each_other(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        WorkerConfig(**settings)
