"""KV blocks on their way from one worker's cache to another's, past the scheduler.

A *push* copies a block to the *inbox* of another worker; a *take* copies it from there to the
worker's own cache. Peers below minor ``MOVES_MINOR`` get none of them. *Guests* are blocks from
another cell, whose scheduler does not know the places of the inbox. Peers below ``GUESTS_MINOR``
get none.
"""

from typing import Annotated, Literal

from msgspec import Meta

from shared.wire.messages.ranges import Int32, Int64, Name, Row
from shared.wire.messages.stores import BlockKey

MAX_INBOX_BLOCKS = 1 << 16

WorkerRole = Literal["both", "prefill", "decode"]
NumInboxBlocks = Annotated[int, Meta(ge=1, le=MAX_INBOX_BLOCKS)]


class Push(Row, tag=6, frozen=True):
    """The worker copies its ``block``, which is ``key``, and sends it to the inbox of
    ``worker``."""

    key: BlockKey
    block: Int32
    worker: Name


class Take(Row, tag=7, frozen=True):
    """The worker copies the block ``key`` from its inbox, which loses it, to its own ``block``."""

    key: BlockKey
    block: Int32


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
    it has one."""

    layout: Name
    location: Name
    num_blocks: NumInboxBlocks
    block_bytes: Int64
    address: Name = ""
    role: WorkerRole = "both"
    num_guests: Int32 = 0
    cell: Name = ""


class Meet(Row, tag=41, frozen=True):
    """Scheduler → worker, before its first Push to ``worker``, which is at the tcp ``address``;
    empty: at its socket file. Blocks for it ``are_guests`` if it belongs to another cell."""

    worker: Name
    address: Name = ""
    are_guests: bool = False


class Pushed(Row, tag=42, frozen=True):
    """Worker → worker: the blocks ``keys``, and the CRC-32 of each. Guests have the scheduler of
    their ``origin``. Buffers: u1, the bytes of each block."""

    keys: list[BlockKey]
    checksums: list[Int64]
    origin: Name = ""


class Arrived(Row, tag=43, frozen=True):
    """Worker → scheduler: the blocks ``keys`` are in its inbox, until a Take or Discard, or until
    it attaches again."""

    keys: list[BlockKey]
    are_guests: bool = False


class Settled(Row, tag=44, frozen=True):
    """Worker → the scheduler of their origin: the guests ``keys`` are in the worker's cache."""

    keys: list[BlockKey]
