"""Workers without a store, refusals, and the memory of a store."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from cli.plan.footprint import footprint_of
from services.worker.machine.hardware import Memory
from services.worker.stores import addition, folder, opening
from services.worker.stores.addition import check, make
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from tests.services.worker.stores.worker import SIZE, StoreWorker

CPU = torch.device("cpu")
ROW = "KV store (kv-offloading-size)"


@pytest.mark.parametrize(
    ("settings", "head", "why"),
    [
        (
            {"tensor_parallel_size": 2, "kv_disk_size": 1, "kv_disk_dir": "/disk"},
            object(),
            "several ranks have none with kv-disk-size",
        ),
        (
            {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "::1", "insecure_tcp": True},
            object(),
            "several ranks have none with nnodes above 1",
        ),
        ({"tensor_parallel_size": 2}, object(), "several ranks have none with GPUs"),
        ({"pipeline_parallel_size": 3}, object(), "there is none with pipeline-parallel-size 3"),
        ({}, None, "the model pools"),
    ],
)
def test_workers_without_stores(
    settings: dict[str, Any],
    head: object,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = WorkerConfig(kv_offloading_size=1, **settings)
    monkeypatch.setattr(addition, "is_on_gpu", lambda model: "GPUs" in why)
    model: Any = SimpleNamespace(lm_head=head)
    assert make(config, tmp_path, model, torch.float32) is None
    assert f"kv-offloading-size: no KV block is saved: {why}" in caplog.text


def test_models_of_transformers_have_no_stores(caplog: pytest.LogCaptureFixture) -> None:
    check(WorkerConfig(kv_offloading_size=1), CPU, pools=False, is_ours=False)
    assert "no KV block is saved: transformers computes this model" in caplog.text


def test_a_store_has_a_place(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv-offloading-size: 1 bytes are less than a block of"):
        StoreWorker(checkpoint, tmp_path, kv_offloading_size=1e-9)


def test_a_store_has_no_more_places_than_a_scheduler_knows(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "MAX_PLACES", 5)
    worker = StoreWorker(checkpoint, tmp_path)
    assert worker.part.own.header.num_places == 5
    worker.close()


def test_no_room_in_the_folder_is_an_error_with_both_sizes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk(NamedTuple):
        f_bavail: int = 1000
        f_frsize: int = 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Disk())
    with pytest.raises(ConfigError, match=r"^kv-offloading-size: .*need \d+ bytes more in"):
        StoreWorker(checkpoint, tmp_path)


def test_no_memory_for_store_and_cache_is_an_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "is_memory", lambda path: True)
    monkeypatch.setattr(addition, "read_memory", lambda device, node: Memory(1 << 40, 1 << 20))
    with pytest.raises(ConfigError, match=r"^kv-offloading-size: .*of memory more.*1048576 are"):
        StoreWorker(checkpoint, tmp_path)


def test_a_full_disk_at_the_start_is_an_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match=r"^kv-offloading-dir: .*No space left"):
        StoreWorker(checkpoint, tmp_path)


@pytest.mark.parametrize("is_memory", [False, True])
def test_memory_of_a_store_is_planned(
    is_memory: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store on tmpfs, and once: a lost worker's store is there already."""
    monkeypatch.setattr(folder, "is_memory", lambda path: is_memory)
    config = WorkerConfig(
        model=str(checkpoint), device="cpu", kv_offloading_size=SIZE, kv_offloading_dir=tmp_path
    )

    def planned() -> int:
        return footprint_of(config, CPU).requirements.added.get(ROW, 0)

    whole = int(SIZE * (1 << 30))
    assert planned() == (whole if is_memory else 0)
    worker = StoreWorker(checkpoint, tmp_path)
    assert planned() == (whole if is_memory else 0)
    worker.close()
    assert planned() < whole // 100


@pytest.mark.parametrize("num_left", [1, 2])
def test_a_new_layout_takes_the_memory_of_a_lost_store_if_there_is_too_little(
    num_left: int, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    StoreWorker(checkpoint, tmp_path).close()
    free = iter([0] if num_left == 1 else [])
    space = opening._free_space
    monkeypatch.setattr(opening, "_free_space", lambda folder: next(free, space(folder)))
    StoreWorker(checkpoint, tmp_path, kv_cache_dtype="int8").close()
    stores = [path.name for path in tmp_path.glob("*/*") if path.is_dir()]
    assert stores == ["0"] * num_left
