"""The folders of stores: ``FOLDER/LAYOUT/NUMBER/``, each of one store.

All are of this user alone, since KV blocks are made of prompts. One process owns a store while it
holds the lock of its folder. Stores without an owner stay, for the next worker of the layout.
"""

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from shared.errors import ConfigError

SETTING = "kv-offloading-dir"
MAX_STORES = 256  # of one layout
MOUNTS = Path("/proc/self/mountinfo")
LOCK, LOCATION, HEADER = "lock", "location", "store.json"
BLOCKS, RECORDS = "blocks.bin", "records.bin"
STATES, RECORDS_OF_STATES = "states.bin", "records_of_states.bin"
FORMAT = 1  # of the files
NUM_TRIES, TRY_S = 3, 0.02  # of a lock, which others hold for a moment to count bytes
IN_MEMORY = {"tmpfs", "ramfs"}


class Part(NamedTuple):
    """Places of equal size in the file ``content``, and their records in another one."""

    content: str
    records: str
    num_places: int
    place_bytes: int


class Header(msgspec.Struct, frozen=True):
    """A store has places for blocks, and behind them for states."""

    format: int
    layout: str
    id: str
    num_places: int
    place_bytes: int
    num_states: int = 0
    state_bytes: int = 0

    @property
    def parts(self) -> list[Part]:
        blocks = Part(BLOCKS, RECORDS, self.num_places, self.place_bytes)
        states = Part(STATES, RECORDS_OF_STATES, self.num_states, self.state_bytes)
        return [blocks, states] if self.num_states else [blocks]


def read_header(folder: Path) -> Header | None:
    """None if there is none, or a bad one."""
    try:
        fd = open_private(folder / HEADER, writes=False)
        with open(fd, "rb") as stream:
            return msgspec.json.decode(stream.read(4096), type=Header)
    except (OSError, msgspec.MsgspecError):
        return None


def write_header(folder: Path, header: Header) -> None:
    """Raises OSError."""
    made = folder / f"{HEADER}.new"
    made.write_bytes(msgspec.json.encode(header))
    made.replace(folder / HEADER)


def make_private(folder: Path, forbidden: int = 0o077, setting: str = SETTING) -> None:
    """Makes ``folder`` of a ``setting``, or checks that nobody else has the permissions
    ``forbidden`` there. Raises ConfigError."""
    try:
        with suppress(FileExistsError):
            folder.mkdir(0o700, parents=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{setting}: {folder}: {error.strerror}") from None
    if folder.is_symlink() or not folder.is_dir():
        raise ConfigError(f"{setting}: {folder} is a link, or not a folder")
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{setting}: {folder} is of user {found.st_uid}, and this is user {os.getuid()};"
            " name a folder in it that does not exist yet"
        )
    if found.st_mode & forbidden:
        raise ConfigError(
            f"{setting}: {folder} has mode {found.st_mode & 0o777:o}, and is open to other users;"
            " make it 700"
        )


def open_private(path: Path, *, writes: bool) -> int:
    """The descriptor of a file, which is made if it ``writes``. Raises OSError, for a link too."""
    flags = os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def claim(location: Path, setting: str = SETTING, wanted: int | None = None) -> tuple[Path, int]:
    """The first folder in ``location`` without an owner, or the ``wanted`` one, and the descriptor
    of its lock, which is held until it is closed. Raises ConfigError."""
    for number in range(MAX_STORES) if wanted is None else [wanted]:
        folder = location / str(number)
        for _ in range(NUM_TRIES):
            make_private(folder, setting=setting)
            try:
                lock = try_lock(folder)
            except FileNotFoundError:  # another worker has just removed the folder
                continue
            except OSError as error:
                raise ConfigError(f"{setting}: {folder}: {error.strerror}") from None
            if lock is not None:
                return folder, lock
            time.sleep(TRY_S)
    if wanted is not None:
        raise ConfigError(f"{setting}: {location / str(wanted)} has an owner that still runs")
    raise ConfigError(f"{setting}: {location} has {MAX_STORES} stores of running workers")


def try_lock(folder: Path) -> int | None:
    """The descriptor of the lock of a store, or None if it has an owner. Raises OSError."""
    lock = open_private(folder / LOCK, writes=True)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / LOCK).stat().st_ino != os.fstat(lock).st_ino:
            raise FileNotFoundError(errno.ENOENT, "it was removed")
        return lock
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError:
        os.close(lock)
        raise


def read_location(folder: Path) -> str:
    """The id of a ``folder`` of stores, equal for all its users. Raises OSError."""
    path = folder / LOCATION
    if not path.exists():
        made = folder / f"{LOCATION}.{secrets.token_hex(8)}"
        made.write_text(secrets.token_hex(16))
        with suppress(FileExistsError):
            os.link(made, path)
        made.unlink()
    return path.read_text()[:64]


def is_memory(folder: Path) -> bool:
    """True if files in ``folder``, which may not exist yet, are memory, or nobody knows."""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return True
    kinds = {}  # of file systems, by mount point; the last one of a point is seen
    for line in lines:
        mount, _, kind = line.partition(" - ")
        kinds[Path(mount.split()[4].replace("\\040", " "))] = kind.split()[0]
    whole = folder.absolute().resolve()
    found = next((kinds[each] for each in (whole, *whole.parents) if each in kinds), None)
    return found is None or found in IN_MEMORY


def ownerless(root: Path) -> Iterator[tuple[Path, int]]:
    """Stores in ``root`` without an owner, the one used least recently at the front, with the
    descriptors of their locks, which the caller closes."""
    found = []
    if not root.exists() or root.lstat().st_uid != os.getuid():
        return
    for path in root.glob(f"*/*/{HEADER}"):
        header = read_header(path.parent)
        if header is not None and header.format == FORMAT:
            with suppress(OSError):  # another worker may remove it
                found.append(((path.parent / BLOCKS).stat().st_mtime, path.parent))
    for _, folder in sorted(found):
        with suppress(OSError):
            if (lock := try_lock(folder)) is not None:
                yield folder, lock


def ownerless_bytes(root: Path) -> int:
    """The bytes that stores without an owner take."""
    total = 0
    for folder, lock in ownerless(root):
        total += taken_bytes(folder)
        os.close(lock)
    return total


def taken_bytes(folder: Path) -> int:
    total = 0
    with suppress(OSError):  # another worker may remove them
        for each in folder.iterdir():
            total += each.stat().st_blocks * 512
    return total


def remove_ownerless(root: Path, num_bytes: int) -> list[Path]:
    """Removes stores without an owner until ``num_bytes`` are free, or none is left. Returns their
    folders."""
    removed = []
    for folder, lock in ownerless(root):
        if num_bytes > 0:
            num_bytes -= taken_bytes(folder)
            with suppress(OSError):  # renamed first, so that nobody claims a part of it
                shutil.rmtree(folder.rename(f"{folder}.{secrets.token_hex(8)}"))
            removed.append(folder)
        os.close(lock)
    return removed
