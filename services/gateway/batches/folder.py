"""The folder of files and batches, which gateways may share.

    files/ID.json     what a file is; there once it is whole
    files/ID.data     what it holds
    batches/ID.json   how far a batch is; written by the gateway that runs it
    batches/ID.lock   locked by that gateway while it lives
    batches/ID.cancel there when a client has cancelled it

Each JSON file is replaced as a whole. All of it blocks: for threads, and for what is small.
"""

import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from services.gateway.batches.objects import StoredBatch, StoredFile
from shared.errors import ConfigError, NotFound, RequestError

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")

Stored = TypeVar("Stored", bound=Struct)


class NoRoom(RequestError):
    """The folder cannot be written to."""

    status = 507
    type = "server_error"
    code = "storage_error"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def no_room(error: OSError) -> NoRoom:
    return NoRoom(f"the server cannot write to its batch-dir: {error.strerror}")


class BatchFolder:
    """Raises ConfigError for a folder in which nothing can be written."""

    def __init__(self, folder: Path) -> None:
        self._files = folder / "files"
        self._batches = folder / "batches"
        try:
            for each in (folder, self._files, self._batches):
                each.mkdir(mode=0o700, exist_ok=True)
                if not os.access(each, os.W_OK | os.X_OK):
                    raise ConfigError(f"batch-dir: {each}: nothing can be written there")
        except OSError as error:
            raise ConfigError(f"batch-dir: {folder}: {error.strerror}") from None

    def data_path(self, file_id: str) -> Path:
        return self._files / f"{file_id}.data"

    def create_data(self, file_id: str) -> BinaryIO:
        """Raises OSError, as all that follow do."""
        return _create(self.data_path(file_id))

    def save_file(self, stored: StoredFile) -> None:
        _replace(self._files / f"{stored.file.id}.json", stored)

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Raises NotFound for another's, too."""
        if FILE_ID.fullmatch(file_id):
            stored = _read(self._files / f"{file_id}.json", StoredFile)
            if stored is not None and stored.owner == owner:
                return stored
        raise NotFound(f"no such file: {file_id[:60]}", param="file_id")

    def files(self, owner: str) -> list[StoredFile]:
        return [each for each in _all(self._files, StoredFile) if each.owner == owner]

    def drop_data(self, file_id: str) -> None:
        self.data_path(file_id).unlink(missing_ok=True)

    def delete_file(self, file_id: str) -> None:
        (self._files / f"{file_id}.json").unlink(missing_ok=True)
        self.drop_data(file_id)

    def save_batch(self, stored: StoredBatch) -> None:
        _replace(self._batches / f"{stored.batch.id}.json", stored)

    def batch(self, batch_id: str, owner: str) -> StoredBatch:
        """Raises NotFound for another's, too."""
        stored = self.any_batch(batch_id) if BATCH_ID.fullmatch(batch_id) else None
        if stored is None or stored.owner != owner:
            raise NotFound(f"no such batch: {batch_id[:60]}", param="batch_id")
        return stored

    def any_batch(self, batch_id: str) -> StoredBatch | None:
        return _read(self._batches / f"{batch_id}.json", StoredBatch)

    def batches(self, owner: str | None = None) -> list[StoredBatch]:
        """Without an owner those of all."""
        stored = _all(self._batches, StoredBatch)
        return [each for each in stored if owner is None or each.owner == owner]

    def batch_ids(self) -> set[str]:
        return {path.stem for path in self._batches.glob("*.json")}

    def cancel(self, batch_id: str) -> None:
        (self._batches / f"{batch_id}.cancel").touch()

    def cancelled_at(self, batch_id: str) -> int | None:
        try:
            return int((self._batches / f"{batch_id}.cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def try_lock(self, batch_id: str) -> int | None:
        """A descriptor whose closing is the end of the lock; None where another holds it."""
        path = self._batches / f"{batch_id}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")


def _replace(path: Path, stored: Struct) -> None:
    """After a crash of the machine too, ``path`` is what it was or what it shall be."""
    new = path.with_suffix(f".{secrets.token_hex(4)}.new")
    try:
        with _create(new) as file:
            file.write(msgspec.json.encode(stored))
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def _read(path: Path, kind: type[Stored]) -> Stored | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _all(folder: Path, kind: type[Stored]) -> Iterator[Stored]:
    for path in folder.glob("*.json"):
        if (stored := _read(path, kind)) is not None:
            yield stored
