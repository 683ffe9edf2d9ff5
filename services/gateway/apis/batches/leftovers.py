"""Removes leftovers of killed gateways from the folder of files and batches. Blocks."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from services.gateway.apis.batches.folder import BatchFolder, BatchKey, modified_s, prune, read
from services.gateway.apis.batches.objects import StoredBatch, StoredFile

MIN_AGE_S = 3600.0
"""The minimum age of a removed file: a gateway may still be writing younger ones."""


def remove_leftovers(folder: BatchFolder, now_s: float) -> None:
    """Removes data of no file and of no batch, and JSON that was not written to its end, at one
    gateway at a time. Raises OSError, and MsgspecError for a batch that cannot be read."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    descriptor = os.open(folder.root / "leftovers.lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        move_flat_files(folder)
        for path in _leftovers(folder):
            if modified_s(path) < now_s - MIN_AGE_S:
                path.unlink(missing_ok=True)
        for ended in folder.ended_root.iterdir():
            prune(ended, now_s)
    except BlockingIOError:
        return
    finally:
        os.close(descriptor)


def _leftovers(folder: BatchFolder) -> Iterator[Path]:
    yield from folder.root.glob("*/*/*.new")
    for kind in ("lock", "cancel"):
        for path in folder.batches_root.glob(f"*/*.{kind}"):
            if not path.with_suffix(".json").exists():
                yield path
    named = _named(folder)
    for path in folder.files_root.glob("*/*.data"):
        if path.stem not in named and not path.with_suffix(".json").exists():
            yield path


def _named(folder: BatchFolder) -> set[str]:
    """The files of unfinished batches."""
    found = [folder.open_batch(key) for key in folder.open_keys()]
    return {
        file_id
        for each in found
        if each is not None
        for file_id in (each.batch.input_file_id, each.good_file_id, each.bad_file_id)
    }


def move_flat_files(folder: BatchFolder) -> None:
    """No gateway of before runs any more. Raises OSError."""
    for path in folder.files_root.glob("*.json"):
        if (file := read(path, StoredFile)) is not None:
            folder.save_file(file)
            _move(path.with_suffix(".data"), folder.data_path(file.file.id, file.owner))
            path.unlink()
    for path in folder.batches_root.glob("*.json"):
        if (stored := read(path, StoredBatch)) is not None:
            for file_id in (stored.good_file_id, stored.bad_file_id):
                data = folder.files_root / f"{file_id}.data"
                _move(data, folder.data_path(file_id, stored.owner))
            folder.save_batch(stored)
            if path.with_suffix(".cancel").exists() and not stored.batch.has_ended:
                folder.cancel(BatchKey(stored.owner, stored.batch.id))
            for each in (path, path.with_suffix(".cancel"), path.with_suffix(".lock")):
                each.unlink(missing_ok=True)


def _move(old: Path, new: Path) -> None:
    if old.exists():
        new.parent.mkdir(mode=0o700, exist_ok=True)
        old.rename(new)
