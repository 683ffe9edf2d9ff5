"""The folder of files and batches: contents by owner, and removals at start."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.gateway.apis.batches import folder as module
from services.gateway.apis.batches.folder import (
    MAX_ENDED_AGE_S,
    BatchFolder,
    BatchKey,
    NoRoom,
    new_batch_id,
    new_file_id,
)
from services.gateway.apis.batches.leftovers import MIN_AGE_S, remove_leftovers
from services.gateway.apis.batches.objects import (
    BatchObject,
    FileObject,
    RequestCounts,
    StoredBatch,
    StoredFile,
)
from shared.errors import NotFound

OLD_S = 2 * MIN_AGE_S


@pytest.fixture
def folder(tmp_path: Path) -> BatchFolder:
    return BatchFolder(tmp_path / "store")


def file_of(owner: str, file_id: str = "") -> StoredFile:
    file = FileObject(
        id=file_id or new_file_id(), bytes=2, created_at=1, filename="f", purpose="batch"
    )
    return StoredFile(owner, file)


def batch_of(owner: str, input_file_id: str = "file-0") -> StoredBatch:
    batch = BatchObject(
        id=new_batch_id(),
        endpoint="/v1/completions",
        input_file_id=input_file_id,
        completion_window="24h",
        created_at=1,
        expires_at=2,
        request_counts=RequestCounts(),
    )
    return StoredBatch(owner, batch, new_file_id(), new_file_id())


def key_of(stored: StoredBatch) -> BatchKey:
    return BatchKey(stored.owner, stored.batch.id)


def save_data(folder: BatchFolder, file_id: str, owner: str) -> Path:
    with folder.create_data(file_id, owner) as file:
        file.write(b"{}")
    return folder.data_path(file_id, owner)


def age(path: Path) -> Path:
    os.utime(path, times=(time.time() - OLD_S,) * 2)
    return path


def end(folder: BatchFolder, stored: StoredBatch) -> None:
    stored.batch.status = "completed"
    folder.save_batch(stored)


@pytest.mark.parametrize("owner", ["ann", ""])
def test_an_owner_has_files_and_batches_of_its_own(folder: BatchFolder, owner: str):
    file, batch = file_of(owner), batch_of(owner)
    folder.save_file(file)
    folder.save_batch(batch)
    assert folder.file(file.file.id, owner) == file
    assert folder.files(owner) == [file]
    assert folder.batch(key_of(batch)) == batch
    assert folder.open_keys() == {key_of(batch)}
    assert (folder.files("bob"), folder.batches("bob")) == ([], [])
    with pytest.raises(NotFound):
        folder.file(file.file.id, "bob")
    with pytest.raises(NotFound):
        folder.batch(BatchKey("bob", batch.batch.id))


def test_an_ended_batch_is_found_but_not_run_again(folder: BatchFolder):
    batch = batch_of("ann")
    folder.save_batch(batch)
    folder.cancel(key_of(batch))
    lock = folder.try_lock(key_of(batch))
    assert lock is not None
    assert folder.try_lock(key_of(batch)) is None
    end(folder, batch)
    folder.unlock(key_of(batch), lock)
    assert folder.open_keys() == set()
    assert folder.batches("ann") == [folder.batch(key_of(batch))] == [batch]
    assert [*(folder.batches_root / "ann").iterdir()] == []


def test_a_key_has_a_limit_of_batches_that_have_not_ended(folder: BatchFolder):
    batches = [batch_of("ann") for _ in range(3)]
    assert [folder.try_add(batch, 2) for batch in batches] == [True, True, False]
    assert folder.try_add(batch_of("bob"), 2)
    end(folder, batches[0])
    assert folder.try_add(batches[2], 2)


def test_of_ended_batches_the_last_are_kept_for_a_time(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_ENDED", 2)
    batches = [batch_of("ann") for _ in range(4)]
    for number, batch in enumerate(batches):
        end(folder, batch)
        path = folder.ended_root / "ann" / f"{batch.batch.id}.json"
        os.utime(path, times=(time.time() - 100 + number,) * 2)
    end(folder, other := batch_of("bob"))
    assert {each.batch.id for each in folder.batches("ann")} == {
        each.batch.id for each in batches[2:]
    }
    remove_leftovers(folder, time.time() + MAX_ENDED_AGE_S - 50)
    assert folder.batches("ann") == []
    assert folder.batches("bob") == [other]


def test_a_key_has_no_more_bytes_than_are_free(
    folder: BatchFolder, monkeypatch: pytest.MonkeyPatch
):
    for owner in ("ann", ""):
        for _ in range(3):
            save_data(folder, new_file_id(), owner)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    folder.check_part("ann", 4)
    with pytest.raises(NoRoom, match=r"have 6 bytes and the upload 5.*, 10$"):
        folder.check_part("ann", 5)
    folder.check_part("bob", 10)
    folder.check_part("", 100)


def test_a_start_removes_the_leftovers_of_a_killed_gateway(folder: BatchFolder):
    file, batch = file_of("ann"), batch_of("ann", input_file_id=new_file_id())
    folder.save_file(file)
    folder.save_batch(batch)
    kept = [age(save_data(folder, file.file.id, "ann"))]
    for file_id in (batch.batch.input_file_id, batch.good_file_id, batch.bad_file_id):
        kept.append(age(save_data(folder, file_id, "ann")))
    kept.append(save_data(folder, new_file_id(), "ann"))  # possibly an upload in progress
    left = [age(save_data(folder, new_file_id(), "ann"))]
    for root in (folder.files_root, folder.batches_root, folder.ended_root):
        path = root / "ann" / "some.0123.new"
        path.parent.mkdir(exist_ok=True)
        path.touch()
        left.append(age(path))
    gone = batch_of("ann")
    for kind in ("lock", "cancel"):
        path = folder.batches_root / "ann" / f"{gone.batch.id}.{kind}"
        path.touch()
        left.append(age(path))
    lock = folder.try_lock(key_of(batch))
    assert lock is not None
    remove_leftovers(folder, time.time())
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    assert folder.batch(key_of(batch)) == batch
    assert folder.try_lock(key_of(batch)) is None
    os.close(lock)


def test_files_of_gateways_of_before_get_their_owners_folder(folder: BatchFolder):
    file, batch = file_of("ann"), batch_of("")
    folder.save_file(file)
    save_data(folder, file.file.id, "ann")
    folder.save_batch(batch)
    folder.cancel(key_of(batch))
    save_data(folder, batch.good_file_id, "")
    for root in (folder.files_root, folder.batches_root):
        for path in [*root.glob("*/*")]:
            path.rename(root / path.name)
    assert folder.open_keys() == set()
    remove_leftovers(folder, time.time())
    assert folder.file(file.file.id, "ann") == file
    assert folder.data_path(file.file.id, "ann").read_bytes() == b"{}"
    assert folder.batch(key_of(batch)) == batch
    assert folder.cancelled_at(key_of(batch)) is not None
    assert folder.data_path(batch.good_file_id, "").exists()
    assert not [*folder.files_root.glob("*.*"), *folder.batches_root.glob("*.*")]
