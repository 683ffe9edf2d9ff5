"""A running sequence on its way to another worker, block by block. Pure."""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.scheduler.allocation import Allocation
from services.scheduler.moves.inbox import Place, Places
from services.scheduler.placement import Placement
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.wire.messages import Inbox, Push

Why = Literal["leaving", "role"]

NEAR_TOKENS = 32
"""The most tokens computed again after a move with small blocks. Chosen."""
MAX_REWINDS = 3  # a target that evicts blocks of a move again and again is too full for it


class Target(Protocol):
    """A worker with the inbox ``message`` that takes blocks of others. ``num_meant`` of its blocks
    are for the ``incoming`` moves."""

    name: str
    message: Inbox
    block_size: int
    incoming: dict["Move", None]
    num_meant: int

    @property
    def inbox(self) -> Places: ...

    def has(self, key: bytes) -> bool:
        """True if the block is in its prefix cache."""

    def has_place(self, move: "Move", placement: Placement) -> bool:
        """True if it has room for the sequence now."""

    def has_all(self, move: "Move") -> bool:
        """True if it has evicted no block of the move meanwhile."""


class Source(Protocol):
    """A worker whose sequences move. Some targets are ``avoided`` for a number of looks, as are
    moves of sequences ``tried`` before."""

    worker: WorkerState
    block_size: int
    moves: dict[Sequence, "Move"]
    avoided: dict[Target, int]
    tried: dict[Sequence, int]


@dataclass(slots=True, eq=False)
class Move:
    """A running sequence on its way from ``source`` to ``target``. Its first ``num_there`` blocks
    are in the target's prefix cache, and its first ``num_pushed`` ones are or were on their way. It
    had ``num_blocks`` at the beginning. ``is_stuck``: a block is missing at the source.
    ``num_looks`` counts the looks since all is there and the target has no room. While it
    ``is_switching``, no plan computes it."""

    sequence: Sequence
    source: Source
    target: Target
    why: Why
    allocation: Allocation = field(init=False)
    num_blocks: int = field(init=False)
    num_there: int = 0
    num_pushed: int = 0
    num_rewinds: int = 0
    num_looks: int = 0
    is_stuck: bool = False
    is_switching: bool = False

    def __post_init__(self) -> None:
        self.allocation = self.sequence.allocated
        self.num_blocks = len(self.allocation.blocks)

    @property
    def is_over(self) -> bool:
        """True if the sequence has ended, or has left its worker otherwise."""
        return self.sequence.allocation is not self.allocation

    def key(self, number: int) -> bytes:
        return self.sequence.block_hash(number, self.source.block_size)

    @property
    def num_wanted(self) -> int:
        """Counts the full blocks that the target could use."""
        size = self.source.block_size
        return min(self.allocation.num_indexed, self.sequence.max_cached // size)

    @property
    def is_near(self) -> bool:
        """True if the target lacks at most a block and the tokens behind it."""
        size = self.source.block_size
        num_computed = min(self.allocation.num_computed, self.sequence.num_known)
        return num_computed - self.num_there * size <= max(2 * size - 1, NEAR_TOKENS)

    @property
    def is_in_flight(self) -> bool:
        """True if a plan in flight computes the sequence."""
        in_flight = self.source.worker.in_flight
        return bool(in_flight) and self.allocation.last_step >= in_flight[0].step

    def follow(self) -> None:
        """Counts the blocks at the target. Those it has evicted are pushed again."""
        num_wanted = self.num_wanted
        while self.num_there < num_wanted and self.target.has(self.key(self.num_there)):
            self.num_there += 1
        self.num_pushed = max(self.num_pushed, self.num_there)
        if self.num_pushed > self.num_there:
            place = self.target.inbox.find(self.key(self.num_there))
            if place is None:
                self.rewind(self.num_there)

    def rewind(self, num_there: int) -> None:
        self.num_there = self.num_pushed = num_there
        self.num_rewinds += 1
        self.is_stuck |= self.num_rewinds > MAX_REWINDS

    def push(self, most: int) -> list[tuple[Push, Place]]:
        """Returns up to ``most`` rows for the next blocks that the target lacks."""
        rows: list[tuple[Push, Place]] = []
        inbox, num_wanted = self.target.inbox, self.num_wanted
        while self.num_pushed < num_wanted and len(rows) < most:
            key = self.key(self.num_pushed)
            if not self.target.has(key):
                if (place := inbox.find(key)) is not None:
                    if place.is_stale or place.is_sent:
                        break  # the inbox loses it first
                    place.is_wanted = True
                else:
                    block = self.source.worker.index.find(key)
                    self.is_stuck |= block is None
                    if block is None or inbox.is_full:
                        break
                    rows.append((Push(key, block, self.target.name), inbox.reserve(key)))
            self.num_pushed += 1
        return rows

    def mark(self, is_wanted: bool) -> None:
        """Marks the places of its blocks. Unwanted are also those that the target has computed."""
        for number in range(self.num_there if is_wanted else 0, self.num_pushed):
            place = self.target.inbox.find(self.key(number))
            if place is not None and not place.is_guest:
                place.is_wanted = is_wanted

    @property
    def is_overdue(self) -> bool:
        """True if one of its blocks is overdue."""
        inbox = self.target.inbox
        places = (inbox.find(self.key(each)) for each in range(self.num_there, self.num_pushed))
        return any(place is not None and inbox.is_overdue(place) for place in places)
