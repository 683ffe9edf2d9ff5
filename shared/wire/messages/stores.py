"""KV blocks, and states, in stores outside the workers' caches, which outlive a worker.

Peers below minor ``STORES_MINOR`` get none of them, below ``STORED_STATES_MINOR`` no states, and
below ``STORED_WINDOWS_MINOR`` none of layers with windows. A store of memory may have another one
on a *disk* below it, which peers below ``DISK_STORES_MINOR`` do not know. Its copies take longer
than a step, and are answered when they are done.
"""

from typing import Annotated

from msgspec import Meta

from shared.wire.messages.ranges import Int32, Int64, Name, Row, Seconds

MAX_PLACES = 1 << 20  # of a store: a scheduler has state for each
FIRST_STATE = MAX_PLACES  # the place of a store's first state, of any number of blocks
MAX_DISK_BYTES = 64 << 20
"""Of copies to a disk without an answer, and of places read from disks that await their Load; or
one place. The worker holds them in memory. Chosen."""

BlockKey = Annotated[bytes, Meta(min_length=16, max_length=16)]  # a block hash
NumPlaces = Annotated[int, Meta(ge=1, le=MAX_PLACES)]
NumStates = Annotated[int, Meta(ge=0, le=MAX_PLACES)]


class Load(Row, tag=3, frozen=True):
    """The worker copies the block ``key`` from a place of ``store`` to its own ``block``; with a
    ``slot`` a state, to the copy ``block`` and to that slot, which was admitted with the copy. One
    that ``is_fetched`` is in the worker's memory, which loses it."""

    key: BlockKey
    block: Int32
    store: Name
    place: Int32
    slot: Int32 | None = None
    is_fetched: bool = False


class Save(Row, tag=4, frozen=True):
    """The worker copies its ``block``, or a state from copy ``block``, to a place of its store."""

    key: BlockKey
    block: Int32
    place: Int32


class Forget(Row, tag=5, frozen=True):
    """A place of the worker's own store, or of its store on a disk, is free."""

    place: Int32
    is_on_disk: bool = False


class Spill(Row, tag=9, frozen=True):
    """The worker copies the ``place`` of its store, with ``key``, to one of its disk's store."""

    key: BlockKey
    place: Int32
    place_on_disk: Int32


class Fetch(Row, tag=10, frozen=True):
    """The worker reads the place with ``key`` of a disk's ``store``, and holds it for a Load."""

    key: BlockKey
    store: Name
    place: Int32


class Unfetch(Row, tag=11, frozen=True):
    """No Load comes for the fetched ``key``."""

    key: BlockKey


class Inventory(Row, tag=38, frozen=True):
    """Worker → scheduler, after each Attach: its ``store`` and the full places there. The worker
    reads all stores in the same ``location``. The places of states begin at ``FIRST_STATE``.
    Buffers: u1 keys, 16 bytes for each full place, and i4 places, the one saved first at the
    front. A store on a disk, of another location, follows the one in memory."""

    store: Name
    location: Name
    num_places: NumPlaces
    place_bytes: Int64
    num_states: NumStates = 0
    state_bytes: Int64 = 0
    is_on_disk: bool = False


class Copied(Row, tag=39, frozen=True):
    """Worker → scheduler, before the result of a plan with Load or Save rows. ``lost`` are the keys
    that could not be loaded, ``unsaved`` the ones that could not be saved. An own store that
    ``is_down`` takes no more. Loads took ``load_s``."""

    step: Int64
    lost: list[BlockKey] = []
    unsaved: list[BlockKey] = []
    is_down: bool = False
    load_s: Seconds = 0.0


class Spilled(Row, tag=47, frozen=True):
    """Worker → scheduler: the Spill rows of plan ``step`` are done, but for the keys ``unsaved``. A
    store that ``is_down`` takes no more."""

    step: Int64
    unsaved: list[BlockKey] = []
    is_down: bool = False


class Fetched(Row, tag=48, frozen=True):
    """Worker → scheduler: the worker holds the keys that the Fetch rows of plan ``step`` name, but
    for the ``lost`` ones. The disk took ``fetch_s``."""

    step: Int64
    lost: list[BlockKey] = []
    fetch_s: Seconds = 0.0
