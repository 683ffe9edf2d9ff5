"""A store that fails ends no step."""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.worker.stores.folder import BLOCKS
from services.worker.stores.places import OwnPlaces
from shared.wire.messages import Forget
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.worker import StoreWorker, key_of

IDS = random_ids(37, 150)
BLOCKS_OF_IDS = [0, 1, 2, 3, 4]


@pytest.fixture
def worker(checkpoint: Path, tmp_path: Path) -> Iterator[StoreWorker]:
    """Blocks 0 and 1 are full, and saved under their numbers."""
    worker = StoreWorker(checkpoint, tmp_path)
    worker.generate(IDS, BLOCKS_OF_IDS)
    worker.save([0, 1])
    yield worker
    worker.close()


def files_of(folder: Path) -> Path:
    (path,) = folder.glob(f"*/0/{BLOCKS}")
    return path


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_store_that_cannot_be_written_takes_no_more(
    worker: StoreWorker,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its blocks can still be loaded. One line of the log says why."""
    caplog.set_level(logging.WARNING)
    assert value("shoal_kv_store_up", store=worker.store) == 1

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", fail)
    for _ in range(2):
        copied = worker.save([2, 3], first=2)
        assert copied.unsaved == [key_of(2), key_of(3)]
        assert copied.is_down
    monkeypatch.undo()
    assert worker.save([2], first=2).unsaved == [key_of(2)]
    assert caplog.text.count(os.strerror(code)) == 1
    assert value("shoal_kv_store_up", store=worker.store) == 0
    assert worker.load([5, 6]).lost == []
    assert worker.generate(IDS, [5, 6, 7, 8, 9], num_cached=32) == worker.generate(
        IDS, BLOCKS_OF_IDS
    )


def test_a_write_that_is_cut_is_a_fault(
    worker: StoreWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk. Neither the old nor the new block is read from the place."""
    monkeypatch.setattr(os, "pwritev", lambda fd, pieces, offset: 7)
    assert worker.save([2]).unsaved == [key_of(0)]
    monkeypatch.undo()
    assert worker.load([5, 6]).lost == [key_of(0)]


def test_a_removed_folder_is_a_fault(worker: StoreWorker, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    copied = worker.save([0, 1], first=2)
    assert (copied.unsaved, copied.is_down) == ([key_of(2), key_of(3)], True)
    assert worker.load([5], "0123").lost == [key_of(0)]


def test_a_failing_forget_is_a_fault(worker: StoreWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    worker.copy([Forget(0)])
    monkeypatch.undo()
    assert worker.save([2], first=2).is_down


def test_lost_blocks_are_counted_and_computed_again(worker: StoreWorker, tmp_path: Path) -> None:
    names = ("other", "damaged", "unreadable")
    before = {why: value("shoal_kv_store_lost_total", reason=why) for why in names}
    size = worker.part.own.header.place_bytes
    with files_of(tmp_path).open("r+b") as stream:
        stream.seek(size + 11)
        stream.write(b"\x5a\xa5")
    copied = worker.load([5, 6])
    assert copied.lost == [key_of(1)]
    assert not any(worker.bytes_of(6))
    assert worker.load([7], first=9).lost == [key_of(9)]
    assert worker.load([7], "unknown").lost == [key_of(0)]
    for why in names:
        assert value("shoal_kv_store_lost_total", reason=why) == before[why] + 1
    text = worker.generate(IDS, BLOCKS_OF_IDS)
    assert worker.generate(IDS, [5, 10, 11, 12, 13], num_cached=16) == text


def test_bytes_and_seconds_are_counted(worker: StoreWorker) -> None:
    def counts(direction: str) -> tuple[float, float]:
        found = (value(f"shoal_kv_store_{what}_total", direction=direction) for what in WHAT)
        return next(found), next(found)

    saved, loaded = counts("save"), counts("load")
    worker.save([2], first=2)
    worker.load([5, 6, 7])
    size = worker.part.own.header.place_bytes
    assert counts("save")[0] == saved[0] + size
    assert counts("load")[0] == loaded[0] + 3 * size
    assert counts("save")[1] > saved[1]
    assert counts("load")[1] > loaded[1]


WHAT = ("bytes", "seconds")


def test_a_kill_within_a_save_loses_that_block(
    worker: StoreWorker, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor has the other ones."""

    class Killed(BaseException):
        pass

    def die(self: OwnPlaces, place: int, record: bytes) -> None:
        raise Killed

    monkeypatch.setattr(OwnPlaces, "_write_record", die)
    with pytest.raises(Killed):
        worker.save([2], first=2)
    monkeypatch.undo()
    (store,) = worker.addition._stores
    os.close(store.lock)
    successor = StoreWorker(checkpoint, tmp_path)
    assert successor.part.own.parts[0].keys == {0: key_of(0), 1: key_of(1)}
    assert successor.load([5, 6, 7]).lost == [key_of(2)]
    text = worker.generate(IDS, BLOCKS_OF_IDS)
    assert successor.generate(IDS, [5, 6, 8, 9, 10], num_cached=32) == text
    successor.close()
    worker.addition._stores[0] = worker.addition._stores[0]._replace(
        lock=os.open(tmp_path, os.O_RDONLY)
    )
