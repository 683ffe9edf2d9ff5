"""Opens the store of a worker in a folder of stores."""

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from services.worker.stores import folder as folders
from services.worker.stores.files import OtherStores, StoreFiles
from services.worker.stores.folder import FORMAT, Header, Part, read_header
from services.worker.stores.places import RECORD_BYTES, OwnPlaces
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import MAX_PLACES

log = logging.getLogger(__name__)


class Root(NamedTuple):
    """A folder of stores of ``num_bytes`` each, and its settings."""

    path: Path
    num_bytes: int
    dir_setting: str
    size_setting: str


def roots_of(settings: WorkerConfig) -> list[Root]:
    """In memory, and below it on a disk. Ranks have equal shares."""
    memory = settings.kv_offloading_dir or Path(f"/dev/shm/shoal-{os.getuid()}")
    size = int(settings.kv_offloading_size * (1 << 30)) // settings.num_ranks
    found = [Root(memory, size, folders.SETTING, "kv-offloading-size")]
    if settings.kv_disk_dir is not None and settings.kv_disk_size:
        size = int(settings.kv_disk_size * (1 << 30))
        found.append(Root(settings.kv_disk_dir, size, "kv-disk-dir", "kv-disk-size"))
    return found


class Sizes(NamedTuple):
    """Of a block and a state, with a state for every ``blocks_between`` blocks. The KV cache and
    the states take ``cache_bytes``."""

    block_bytes: int
    state_bytes: int
    blocks_between: int
    cache_bytes: int


class Named(NamedTuple):
    """The store of a worker's first rank: its number in its location, and its id."""

    number: int
    id: str


class OpenStore(NamedTuple):
    """The ``own`` store, the ``others`` in its ``location``, and the descriptor of its lock."""

    own: StoreFiles[OwnPlaces]
    others: OtherStores
    location: str
    lock: int
    number: int

    def close(self) -> None:
        """Gives the store up to the next worker."""
        self.own.close()
        os.close(self.lock)


def open_store(
    root: Root,
    layout: str,
    sizes: Sizes,
    free_memory: Callable[[], int],
    named: Named | None = None,
) -> OpenStore:
    """With the name and the number of another rank's store. Raises ConfigError."""
    num_places, num_states = _count_places(root, sizes)
    folders.make_private(root.path, 0o022, root.dir_setting)
    location = root.path / layout
    folders.make_private(location, setting=root.dir_setting)
    folder, lock = folders.claim(location, root.dir_setting, named and named.number)
    old = read_header(folder)
    is_known = old is not None and (old.format, old.layout) == (FORMAT, layout)
    name = old.id if old is not None and is_known else secrets.token_hex(8)
    name = named.id if named is not None else name
    of_all = num_places, sizes.block_bytes, num_states, sizes.state_bytes
    header = Header(FORMAT, layout, name, *of_all)
    try:
        _make_room(root, folder, header.parts, sizes.cache_bytes, free_memory)
        own = StoreFiles(header, partial(OwnPlaces, folder))
        folders.write_header(folder, header)
        others = OtherStores(location, header)
        opened = OpenStore(own, others, folders.read_location(location), lock, int(folder.name))
    except OSError as error:
        raise ConfigError(
            f"{root.dir_setting}: {folder}: {root.num_bytes} bytes ({root.size_setting}):"
            f" {error.strerror}"
        ) from None
    log.info(
        "KV store: %s: %d blocks and %d states, %d of them full",
        *(folder, num_places, num_states),
        sum(len(each.keys) for each in own.parts),
    )
    return opened


def _count_places(root: Root, sizes: Sizes) -> tuple[int, int]:
    """Counts the places for blocks and for states. Raises ConfigError."""
    of_block = sizes.block_bytes + RECORD_BYTES
    of_state = sizes.state_bytes and sizes.state_bytes + RECORD_BYTES
    num_places, num_states = split(root.num_bytes, of_block, of_state, sizes.blocks_between)
    if not num_places or (of_state and not num_states):
        block = f"a block of {sizes.block_bytes} and its record of {RECORD_BYTES}"
        both = f"{sizes.blocks_between} blocks and a state of {sizes.state_bytes}"
        wanted = both if of_state else block
        raise ConfigError(f"{root.size_setting}: {root.num_bytes} bytes are less than {wanted}")
    if num_places > MAX_PLACES:
        log.warning("%s: only %d blocks of it are used", root.size_setting, MAX_PLACES)
        num_places = MAX_PLACES
    return num_places, min(num_states, num_places)


def _make_room(
    root: Root,
    folder: Path,
    parts: Sequence[Part],
    cache_bytes: int,
    free_memory: Callable[[], int],
) -> None:
    """Raises ConfigError, and OSError."""
    whole = sum(each.num_places * (each.place_bytes + RECORD_BYTES) for each in parts)
    lacking = whole - folders.taken_bytes(folder)
    wanted = lacking + cache_bytes if folders.is_memory(folder) else 0
    too_few = max(lacking - _free_space(folder), wanted - free_memory())
    for removed in folders.remove_ownerless(root.path, too_few):
        log.info("KV store: removed %s, which had no owner", removed)
    gib = root.num_bytes / (1 << 30)
    if lacking > (free := _free_space(folder)):
        raise ConfigError(
            f"{root.size_setting}: {gib:g} GiB need {lacking} bytes more in {root.path},"
            f" where {free} are free; lower it, or name another {root.dir_setting}"
        )
    if wanted > (free := free_memory()):
        raise ConfigError(
            f"{root.size_setting}: {gib:g} GiB need {lacking} bytes of memory more, and the KV"
            f" cache {cache_bytes}; {free} are free: lower it, or num-gpu-blocks-override or"
            " kv-cache-memory-bytes"
        )


def _free_space(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def split(
    num_bytes: int, block_bytes: int, state_bytes: int, blocks_between: int
) -> tuple[int, int]:
    """Counts the places for blocks and for states of a store with ``num_bytes``. States get at most
    half, as in the cache, and one place for the ``blocks_between`` two of a sequence."""
    if not state_bytes:
        return num_bytes // block_bytes, 0
    of_each = num_bytes // (blocks_between * block_bytes + state_bytes)
    num_states = min(num_bytes // 2 // state_bytes, of_each)
    return (num_bytes - num_states * state_bytes) // block_bytes, num_states
