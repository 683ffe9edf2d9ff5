"""A store next to a device, here a CPU: steps are launched while blocks are copied and written.

On the CPU a copy to the host is made as late as possible, on the store's thread.
"""

import errno
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from cli.plan.footprint import footprint_of
from services.worker.engine.protocol import StepOutput
from services.worker.stores import addition, device_copies
from services.worker.stores.device_part import DevicePart
from services.worker.stores.places import OwnPlaces
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    Admit,
    Copied,
    Decode,
    Fetch,
    Forget,
    Load,
    Prefill,
    Save,
    Spill,
    StepPlan,
)
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.worker import GREEDY, NO_IDS, SIZE, StoreWorker, key_of

IDS, OTHERS = random_ids(37, 150), random_ids(37, 150, seed=1)
BLOCKS = list(range(10))
NUM_FULL = 9  # blocks of four
OPTIONS: dict[str, Any] = {"max_model_len": 40}


@pytest.fixture
def worker(checkpoint: Path, tmp_path: Path) -> Iterator[StoreWorker]:
    """The blocks of ``IDS`` are full."""
    worker = StoreWorker(checkpoint, tmp_path, "device", **OPTIONS)
    assert isinstance(worker.part, DevicePart)
    worker.generate(IDS, BLOCKS)
    yield worker
    worker.close()


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """No place is written until the event is set."""
    is_released, save = Event(), OwnPlaces.save

    def held(*arguments: Any) -> None:
        is_released.wait()
        save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(OwnPlaces, "save", held)
        try:
            yield is_released
        finally:
            is_released.set()


def submitted(worker: StoreWorker, plan: StepPlan, ids: np.ndarray = NO_IDS) -> Future[StepOutput]:
    output: Future[StepOutput] = Future()
    worker.engine.submit(plan, ids, output)
    return output


def saves(num: int = NUM_FULL) -> list[Any]:
    return [Save(key_of(number), number, number) for number in range(num)]


def next_owner(step: int, rows: list[Any]) -> StepPlan:
    """Another prompt is computed in the same blocks, after ``rows``."""
    row = Admit(0, "other", 1, 0, 0, len(OTHERS), len(OTHERS), 0, GREEDY, BLOCKS)
    return StepPlan(step, [], [row], [], [Prefill(0, len(OTHERS))], [], 0, rows=rows)


def decoding(step: int, rows: Any = ()) -> StepPlan:
    return StepPlan(step, [], [], [], [], [Decode(0)], 0, rows=[*rows])


def test_a_block_is_saved_as_it_was_before_its_next_owner(worker: StoreWorker) -> None:
    """The store's thread takes it after the step."""
    before, is_launched = [worker.bytes_of(each) for each in range(NUM_FULL)], Event()
    assert isinstance(worker.part, DevicePart)
    worker.part._thread.submit(is_launched.wait)
    try:
        output = submitted(worker, next_owner(100, saves()), np.array(OTHERS, np.int32))
        after = [worker.bytes_of(each) for each in range(NUM_FULL)]
    finally:
        is_launched.set()
    assert not {*before} & {*after}
    output.result()
    others = list(range(20, 20 + NUM_FULL))
    assert worker.load(others).lost == []
    assert [worker.bytes_of(each) for each in others] == before


def test_steps_are_launched_while_places_are_written(
    worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of a plan follows its report, and the report the last write."""
    with held_writes(monkeypatch) as is_released:
        first = submitted(worker, next_owner(100, saves(2)), np.array(OTHERS, np.int32))
        second = submitted(worker, decoding(101))
        num_before = len(worker.copied)
        assert wait([first, second], timeout=0.1).not_done == {first, second}
        assert len(worker.copied) == num_before
        first.add_done_callback(lambda _: worker.copied.append(Copied(-1)))
        is_released.set()
        second.result()
    assert [each.step for each in worker.copied[num_before:]] == [100, -1]
    assert worker.part.own.parts[0].keys == {0: key_of(0), 1: key_of(1)}


def test_a_place_is_read_after_the_write_of_an_earlier_plan(
    worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other places are read at once."""
    worker.save([8], first=8)
    plans = [
        StepPlan(101, [], [], [], [], [], 0, rows=[Load(key_of(8), 20, worker.store, 8)]),
        StepPlan(102, [], [], [], [], [], 0, rows=[Load(key_of(0), 21, worker.store, 0)]),
    ]
    with held_writes(monkeypatch) as is_released, ThreadPoolExecutor(1) as thread:
        submitted(worker, StepPlan(100, [], [], [], [], [], 0, rows=saves(1)))
        submitted(worker, plans[0])
        assert worker.bytes_of(20) == worker.bytes_of(8)
        submitting = thread.submit(submitted, worker, plans[1])
        assert wait([submitting], timeout=0.1).not_done
        is_released.set()
        submitting.result().result()
    assert worker.bytes_of(21) == worker.bytes_of(0)
    assert not any(each.lost for each in worker.copied)


@pytest.mark.parametrize("num_rows", [1, 2, NUM_FULL])
def test_more_blocks_than_a_buffer_holds_are_copied_in_parts(
    num_rows: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = StoreWorker(checkpoint, tmp_path / "plain", "device", **OPTIONS)
    block_bytes = plain.block_bytes
    plain.close()
    monkeypatch.setattr(device_copies, "BUFFER_BYTES", num_rows * block_bytes + 7)
    worker = StoreWorker(checkpoint, tmp_path / "kv", "device", **OPTIONS)
    text = worker.generate(IDS, BLOCKS)
    assert worker.save(BLOCKS[:NUM_FULL]).unsaved == []
    others = list(range(20, 20 + len(BLOCKS)))
    assert worker.load(others[:NUM_FULL]).lost == []
    assert worker.generate(IDS, others, num_cached=4 * NUM_FULL) == text
    worker.close()


@pytest.mark.parametrize("engines", [("torch", "device"), ("device", "torch")], ids="-".join)
def test_both_engines_have_one_format(
    engines: tuple[str, str], checkpoint: Path, tmp_path: Path
) -> None:
    """On a CPU they compute with the same operators, so they read each other's stores."""
    first = StoreWorker(checkpoint, tmp_path, engines[0], **OPTIONS)
    text = first.generate(IDS, BLOCKS)
    first.save(BLOCKS[:NUM_FULL])
    blocks = [first.bytes_of(each) for each in range(NUM_FULL)]
    first.close()
    second = StoreWorker(checkpoint, tmp_path, engines[1], **OPTIONS)
    assert second.store == first.store
    others = list(range(20, 20 + len(BLOCKS)))
    assert second.load(others[:NUM_FULL]).lost == []
    assert [second.bytes_of(each) for each in others[:NUM_FULL]] == blocks
    assert second.generate(IDS, others, num_cached=4 * NUM_FULL) == text
    second.close()


def test_a_store_that_cannot_be_written_ends_no_step(
    worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", fail)
    copied = worker.save([0, 1])
    assert (copied.unsaved, copied.is_down) == ([key_of(0), key_of(1)], True)
    assert worker.generate(IDS, BLOCKS) == worker.generate(IDS, BLOCKS)


def test_a_lost_block_is_cleared(worker: StoreWorker) -> None:
    worker.save([0])
    copied = worker.copy(
        [
            Load(key_of(1), 2, worker.store, 0),
            Load(key_of(0), 20, worker.store, 0),
            Load(key_of(0), 3, "unknown", 0),
        ]
    )
    assert copied.lost == [key_of(1), key_of(0)]
    assert not any(worker.bytes_of(2) + worker.bytes_of(3))
    assert worker.bytes_of(20) == worker.bytes_of(0)


def test_places_go_to_a_disk_and_come_back(checkpoint: Path, tmp_path: Path) -> None:
    """A place is spilled as it was before the same plan overwrites it, and after it was written."""
    disk: dict[str, Any] = {"kv_disk_dir": tmp_path / "disk", "kv_disk_size": SIZE}
    worker = StoreWorker(checkpoint, tmp_path / "kv", "device", **OPTIONS, **disk)
    worker.generate(IDS, BLOCKS)
    below, errors = worker.part.disk, list[Exception]()
    assert below is not None
    done, fetched = Future[Any](), Future[Any]()
    below.start(lambda callback, *arguments: callback(*arguments), errors.append)
    worker.part.on_spilled = lambda step, copies: below.spill(step, copies, done.set_result)
    worker.save([0])
    worker.copy([Spill(key_of(0), 0, 5), Save(key_of(1), 1, 0), Forget(3, True)])
    assert done.result(timeout=60).unsaved == []
    rows = [Fetch(key_of(0), below.header.id, 5)]
    below.fetch(200, rows, fetched.set_result)
    message, contents = fetched.result(timeout=60)
    assert message.lost == []
    below.hold(contents)
    copied = worker.copy([Load(key_of(0), 20, worker.store, 0, is_fetched=True)])
    assert copied.lost == []
    assert worker.bytes_of(20) == worker.bytes_of(0)
    assert worker.load([21], first=0).lost == [key_of(0)]
    assert worker.copy([Load(key_of(1), 21, worker.store, 0)]).lost == []
    assert worker.bytes_of(21) == worker.bytes_of(1)
    assert not errors
    worker.close()


def test_memory_for_copies_is_planned_on_a_gpu(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store itself is in the host's memory."""
    config = WorkerConfig(
        model=str(checkpoint), device="cpu", kv_offloading_size=SIZE, kv_transfer=False
    )
    monkeypatch.setattr(addition, "is_on_gpu", lambda model: True)
    added = footprint_of(config, torch.device("cpu")).requirements.added
    assert added == {"copies for a KV store (kv-offloading-size)": 4 * (16 << 20)}
