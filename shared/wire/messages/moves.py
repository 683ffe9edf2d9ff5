"""KV blocks on their way from one worker's cache to another's, past the scheduler.

A *push* copies a block to the *inbox* of another worker; a *take* copies it from there to the
worker's own cache. Peers below minor ``MOVES_MINOR`` get none of them. *Guests* are blocks from
another cell, whose scheduler does not know the places of the inbox. Peers below ``GUESTS_MINOR``
get none.

Models with windows or states need a keep point too. It moves in *parts*: blocks of windows, and
pieces of a state, each as large as a block. Peers below ``MOVED_POINTS_MINOR`` get none.
"""

from typing import Annotated, Literal

from msgspec import Meta

from shared.wire.messages.ranges import Int32, Int64, Name, Row
from shared.wire.messages.stores import BlockKey

MAX_INBOX_BLOCKS = 1 << 16

WorkerRole = Literal["both", "prefill", "decode", "encoder"]
NumInboxBlocks = Annotated[int, Meta(ge=1, le=MAX_INBOX_BLOCKS)]
NumPieces = Annotated[int, Meta(ge=0, le=MAX_INBOX_BLOCKS)]


class Part(Row, frozen=True):
    """Of the keep point after ``num_blocks`` blocks, the last of which is ``point``: block
    ``number`` in a ``group`` of layers with a window; without a group, a piece of the state."""

    point: BlockKey
    num_blocks: Int32
    number: Int32
    group: Int32 | None = None


class Push(Row, tag=6, frozen=True):
    """The worker copies its ``block``, which is ``key``, and sends it to the inbox of ``worker``.
    A ``part`` of a state is a piece of the copy ``block``."""

    key: BlockKey
    block: Int32
    worker: Name
    part: Part | None = None


class Take(Row, tag=7, frozen=True):
    """The worker copies the block ``key`` from its inbox, which loses it, to its own ``block``; a
    ``part`` of a state to the copy ``block``."""

    key: BlockKey
    block: Int32
    part: Part | None = None


class Discard(Row, tag=8, frozen=True):
    """The worker's inbox loses the block ``key``. If it ``is_cached``, the worker's own cache has
    it already."""

    key: BlockKey
    is_cached: bool = False


class Inbox(Row, tag=40, frozen=True):
    """Worker → every scheduler, after each Attach. The worker is attached to the scheduler
    ``cell``; empty: to the receiver. It takes up to ``num_blocks`` of ``block_bytes`` at once from
    workers of its cell with the same ``layout``, and up to ``num_guests`` more from other cells.
    Workers with the same ``location`` reach it by a socket file, others by its tcp ``address``, if
    it has one. A state is sent in ``num_pieces``; the last one is filled up."""

    layout: Name
    location: Name
    num_blocks: NumInboxBlocks
    block_bytes: Int64
    address: Name = ""
    role: WorkerRole = "both"
    num_guests: Int32 = 0
    cell: Name = ""
    num_pieces: NumPieces = 0


class Meet(Row, tag=41, frozen=True):
    """Scheduler → worker, before its first Push to ``worker``, which is at the tcp ``address``;
    empty: at its socket file. Blocks for it ``are_guests`` if it belongs to another cell."""

    worker: Name
    address: Name = ""
    are_guests: bool = False


class Pushed(Row, tag=42, frozen=True):
    """Worker → worker: the blocks ``keys``, and the CRC-32 of each. Guests have the scheduler of
    their ``origin``. ``parts`` are of keep points: of all keys, or of none. Buffers: u1, the bytes
    of each block."""

    keys: list[BlockKey]
    checksums: list[Int64]
    origin: Name = ""
    parts: list[Part] = []


class Arrived(Row, tag=43, frozen=True):
    """Worker → scheduler: the blocks ``keys``, all of them ``parts`` or none, are in its inbox,
    until a Take or Discard, or until it attaches again."""

    keys: list[BlockKey]
    are_guests: bool = False
    parts: list[Part] = []


class Settled(Row, tag=44, frozen=True):
    """Worker → the scheduler of their origin: the guests ``keys`` are in the worker's cache."""

    keys: list[BlockKey]
