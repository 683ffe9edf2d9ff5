"""The folder of files and batches, which gateways may share.

    files/OWNER/ID.json      the description of a file; exists once the file is whole
    files/OWNER/ID.data      its content
    batches/OWNER/ID.json    the progress of a batch; written by the gateway that runs it
    batches/OWNER/ID.lock    locked by that gateway while it lives
    batches/OWNER/ID.cancel  exists once a client has cancelled the batch
    ended/OWNER/ID.json      a batch that has ended

Each JSON file is replaced as a whole. All functions block: for threads, and for small files.
"""

import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from services.gateway.apis.batches.objects import StoredBatch, StoredFile
from shared.errors import ConfigError, NotFound, RequestError

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
NO_OWNER = "none"
MAX_ENDED = 1000
"""The limit for one owner; the oldest is removed first."""
MAX_ENDED_AGE_S = 30 * 86400

Stored = TypeVar("Stored", bound=Struct)


class NoRoom(RequestError):
    """The folder cannot be written to."""

    status = 507
    type = "server_error"
    code = "storage_error"


class BatchKey(NamedTuple):
    owner: str
    id: str


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    return f"batch_{secrets.token_hex(12)}"


def no_room(error: OSError) -> NoRoom:
    return NoRoom(f"the server cannot write to its batch-dir: {error.strerror}")


class BatchFolder:
    """Raises ConfigError for a folder without write access."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.files_root = folder / "files"
        self.batches_root = folder / "batches"
        self.ended_root = folder / "ended"
        self._adding = threading.Lock()
        try:
            for each in (folder, self.files_root, self.batches_root, self.ended_root):
                each.mkdir(mode=0o700, exist_ok=True)
                if not os.access(each, os.W_OK | os.X_OK):
                    raise ConfigError(f"batch-dir: {each}: nothing can be written there")
        except OSError as error:
            raise ConfigError(f"batch-dir: {folder}: {error.strerror}") from None

    # --- files ----------------------------------------------------------------------------------

    def data_path(self, file_id: str, owner: str) -> Path:
        return _of(self.files_root, owner) / f"{file_id}.data"

    def create_data(self, file_id: str, owner: str) -> BinaryIO:
        """Raises OSError, as all methods below do."""
        return _create(self.data_path(file_id, owner))

    def check_part(self, owner: str, num_bytes: int) -> None:
        """Raises NoRoom if an API key would have more bytes than are free. A server without keys
        has one owner, which may fill the disk."""
        if not owner:
            return
        paths = _of(self.files_root, owner).glob("*.data")
        held, free = sum(map(_size, paths)), shutil.disk_usage(self.root).free
        if held + num_bytes > free:
            raise NoRoom(
                f"files of this API key have {held} bytes and the upload {num_bytes}; the limit is"
                f" what is free in batch-dir, {free}"
            )

    def save_file(self, stored: StoredFile) -> None:
        _replace(self._file_path(stored.file.id, stored.owner), stored)

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Raises NotFound, also for another owner's file."""
        if FILE_ID.fullmatch(file_id):
            stored = read(self._file_path(file_id, owner), StoredFile)
            if stored is not None:
                return stored
        raise NotFound(f"no such file: {file_id[:60]}", param="file_id")

    def files(self, owner: str) -> list[StoredFile]:
        return [*_all(_of(self.files_root, owner), StoredFile)]

    def drop_data(self, file_id: str, owner: str) -> None:
        self.data_path(file_id, owner).unlink(missing_ok=True)

    def delete_file(self, file_id: str, owner: str) -> None:
        self._file_path(file_id, owner).unlink(missing_ok=True)
        self.drop_data(file_id, owner)

    def _file_path(self, file_id: str, owner: str) -> Path:
        return _of(self.files_root, owner) / f"{file_id}.json"

    # --- batches --------------------------------------------------------------------------------

    def try_add(self, stored: StoredBatch, max_open: int) -> bool:
        """False if the owner has ``max_open`` unfinished batches already."""
        folder = _of(self.batches_root, stored.owner)
        with self._adding:
            is_allowed = sum(1 for _ in folder.glob("*.json")) < max_open
            if is_allowed:
                self.save_batch(stored)
        return is_allowed

    def save_batch(self, stored: StoredBatch) -> None:
        _replace(self._open_path(stored, "json"), stored)
        if stored.batch.has_ended:
            self._retire(stored)

    def _retire(self, stored: StoredBatch) -> None:
        ended = _of(self.ended_root, stored.owner)
        ended.mkdir(mode=0o700, exist_ok=True)
        self._open_path(stored, "json").rename(ended / f"{stored.batch.id}.json")
        self._open_path(stored, "cancel").unlink(missing_ok=True)
        prune(ended, time.time())

    def batch(self, key: BatchKey) -> StoredBatch:
        """Raises NotFound, also for another owner's batch."""
        stored = None
        if BATCH_ID.fullmatch(key.id):
            stored = self.open_batch(key)
            if stored is None:  # it may have ended in between, never the other way
                path = _of(self.ended_root, key.owner) / f"{key.id}.json"
                stored = read(path, StoredBatch)
        if stored is None:
            raise NotFound(f"no such batch: {key.id[:60]}", param="batch_id")
        return stored

    def open_batch(self, key: BatchKey) -> StoredBatch | None:
        return read(self._path(key, "json"), StoredBatch)

    def batches(self, owner: str) -> list[StoredBatch]:
        roots = self.batches_root, self.ended_root
        found = [each for root in roots for each in _all(_of(root, owner), StoredBatch)]
        return [*{each.batch.id: each for each in found}.values()]

    def open_batches(self, owner: str) -> list[StoredBatch]:
        return [*_all(_of(self.batches_root, owner), StoredBatch)]

    def open_keys(self) -> set[BatchKey]:
        """Unfinished batches of all owners."""
        paths = self.batches_root.glob("*/*.json")
        keys = {BatchKey(_owner_of(path.parent), path.stem) for path in paths}
        return {key for key in keys if BATCH_ID.fullmatch(key.id)}

    def creation_times(self, keys: Iterable[BatchKey]) -> dict[BatchKey, int]:
        """0 for a batch that cannot be read: its start says so."""
        found = {}
        for key in keys:
            try:
                if (stored := self.open_batch(key)) is not None:
                    found[key] = stored.batch.created_at
            except (OSError, msgspec.MsgspecError):
                found[key] = 0
        return found

    def cancel(self, key: BatchKey) -> None:
        self._path(key, "cancel").touch()

    def cancelled_at(self, key: BatchKey) -> int | None:
        try:
            return int(self._path(key, "cancel").stat().st_mtime)
        except FileNotFoundError:
            return None

    def try_lock(self, key: BatchKey) -> int | None:
        """A descriptor for ``unlock``; None if another process holds the lock."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path(key, "lock"), flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def unlock(self, key: BatchKey, descriptor: int) -> None:
        """Removes the lock's file if its batch is gone. Raises nothing."""
        with suppress(OSError):
            if not self._path(key, "json").exists():
                self._path(key, "lock").unlink(missing_ok=True)
        os.close(descriptor)

    def _open_path(self, stored: StoredBatch, kind: str) -> Path:
        return self._path(BatchKey(stored.owner, stored.batch.id), kind)

    def _path(self, key: BatchKey, kind: str) -> Path:
        return _of(self.batches_root, key.owner) / f"{key.id}.{kind}"


def prune(ended: Path, now_s: float) -> None:
    """Removes the oldest ended batches of an owner."""
    times = {path: modified_s(path) for path in ended.glob("*.json")}
    newest_first = sorted(times, key=lambda path: times[path], reverse=True)
    for number, path in enumerate(newest_first):
        if number >= MAX_ENDED or times[path] < now_s - MAX_ENDED_AGE_S:
            path.unlink(missing_ok=True)


def modified_s(path: Path) -> float:
    """Infinity if another process has removed it."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _of(root: Path, owner: str) -> Path:
    return root / (owner or NO_OWNER)


def _owner_of(folder: Path) -> str:
    return "" if folder.name == NO_OWNER else folder.name


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")


def _replace(path: Path, stored: Struct) -> None:
    """Even after a crash of the machine, ``path`` has its old or its new content."""
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


def read(path: Path, kind: type[Stored]) -> Stored | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None


def _all(folder: Path, kind: type[Stored]) -> Iterator[Stored]:
    for path in folder.glob("*.json"):
        if (stored := read(path, kind)) is not None:
            yield stored
