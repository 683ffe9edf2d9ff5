"""Moves what gateways of before have left in folders without owners."""

from pathlib import Path

from services.gateway.apis.batches.folder import BatchFolder, BatchKey, read
from services.gateway.apis.batches.objects import StoredBatch, StoredFile


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
