"""A running sequence on its way to another worker, block by block. Pure."""

import sys
from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.scheduler.allocation import Allocation
from services.scheduler.block_pool import KeepPoint
from services.scheduler.moves.inbox import Place, Places
from services.scheduler.moves.points import PointShape, key_of, newest_point
from services.scheduler.placement import Placement
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.wire.messages import Inbox, Part, Push

Why = Literal["leaving", "role"]

NEAR_TOKENS = 32
"""The most tokens computed again after a move with small blocks. Chosen."""
MAX_REWINDS = 3  # a target that evicts blocks of a move again and again is too full for it


class Target(Protocol):
    """A worker with the inbox ``message`` that takes blocks of others. ``num_meant`` of its blocks
    are for the ``incoming`` moves."""

    name: str
    message: Inbox
    incoming: dict["Move", None]
    num_meant: int

    @property
    def inbox(self) -> Places: ...

    def has(self, key: bytes, part: Part | None) -> bool:
        """True if the block, or part of a keep point, is in its prefix cache."""

    def has_place(self, move: "Move", placement: Placement) -> bool:
        """True if it has room for the sequence now."""

    def has_all(self, move: "Move") -> bool:
        """True if it has evicted no block of the move meanwhile."""


class Source(Protocol):
    """A worker whose sequences move. Some targets are ``avoided`` for a number of looks, as are
    moves of sequences ``tried`` before."""

    worker: WorkerState
    shape: PointShape
    moves: dict[Sequence, "Move"]
    avoided: dict[Target, int]
    tried: dict[Sequence, int]


@dataclass(slots=True, eq=False)
class Move:
    """A running sequence on its way from ``source`` to ``target``. Of the units that it needs, full
    blocks and then parts of a keep point, the first ``num_there`` are in the target's prefix cache,
    and the first ``num_pushed`` are or were on their way. It had ``num_blocks`` at the beginning.
    ``is_stuck``: a block is missing at the source. ``num_looks`` counts the looks since all is
    there and the target has no room. No plan computes it while it ``is_switching``; then they are
    the looks since a unit has come.

    With windows or states it needs a keep ``point``, which is pushed while the sequence goes on. If
    that is old once it is there, the newest one follows while the sequence waits: ``is_last``."""

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
    point: KeepPoint | None = None
    is_last: bool = False
    _parts: list[tuple[bytes, Part]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocation = self.sequence.allocated
        self.num_blocks = len(self.allocation.blocks)

    @property
    def is_over(self) -> bool:
        """True if the sequence has ended, or has left its worker otherwise."""
        return self.sequence.allocation is not self.allocation

    @property
    def num_whole(self) -> int:
        """Counts the units that are full blocks of layers without a window."""
        if self.point is None:
            return sys.maxsize
        return self.point.num_blocks if self.source.shape.has_whole else 0

    def unit(self, number: int) -> tuple[bytes, Part | None]:
        if number < self.num_whole:
            return self.sequence.block_hash(number, self.source.shape.block_size), None
        return self._parts[number - self.num_whole]

    @property
    def num_wanted(self) -> int:
        """Counts the units that the target could use."""
        shape = self.source.shape
        if self.point is not None:
            return self.num_whole + len(self._parts)
        if not shape.has_whole:
            return 0
        num = min(self.allocation.num_indexed, self.sequence.max_cached // shape.block_size)
        return num - num % shape.interval

    @property
    def end(self) -> int:
        """The number of blocks after which the target can begin once all units are there."""
        if self.source.shape.has_points:
            return 0 if self.point is None else self.point.num_blocks
        return self.num_there

    @property
    def is_near(self) -> bool:
        """True if the target lacks at most a block and the tokens behind it, or a keep point."""
        if not self.source.shape.has_points:
            return self._is_fresh(self.num_there)
        if self.point is not None:
            return self._has_all_units
        if self._is_fresh(0):
            return True
        num_ahead = self.source.worker.capacity.max_num_batched_tokens
        is_followed = not self.source.shape.has_whole or self._is_fresh(self.num_pushed, num_ahead)
        return not self._has_prompt and is_followed

    @property
    def is_ready(self) -> bool:
        """True if all is there that it waits for while it is switching."""
        if not self.source.shape.has_points:
            return True
        return self.is_last and self._has_all_units and self.target.has_all(self)

    @property
    def _has_all_units(self) -> bool:
        return self.num_there >= self.num_wanted

    @property
    def _has_prompt(self) -> bool:
        return self.allocation.num_computed >= len(self.sequence.prompt)

    def _is_fresh(self, num_blocks: int, num_ahead: int = 0) -> bool:
        """True if few tokens are computed behind ``num_blocks``, apart from ``num_ahead``."""
        shape = self.source.shape
        num_computed = min(self.allocation.num_computed, self.sequence.num_known)
        most = max(2 * shape.interval * shape.block_size - 1, NEAR_TOKENS) + num_ahead
        return num_computed - num_blocks * shape.block_size <= most

    @property
    def is_in_flight(self) -> bool:
        """True if a plan in flight computes the sequence."""
        in_flight = self.source.worker.in_flight
        return bool(in_flight) and self.allocation.last_step >= in_flight[0].step

    def hold(self, is_switching: bool) -> None:
        """No plan computes the sequence while it is switching."""
        if is_switching != self.is_switching:
            self.num_looks, self.is_last = 0, False
        self.is_switching = self.allocation.is_held = is_switching
        if is_switching and not self.is_in_flight:
            self.follow()

    def follow(self) -> None:
        """Counts the units at the target. Those it has evicted are pushed again. Between plans."""
        if self.source.shape.has_points:
            self._choose()
        num_wanted = self.num_wanted
        while self.num_there < num_wanted and self.target.has(*self.unit(self.num_there)):
            self.num_there += 1
            self.num_looks *= not self.is_switching
        self.num_pushed = max(self.num_pushed, self.num_there)
        if self.num_pushed > self.num_there:
            place = self.target.inbox.find(self.unit(self.num_there)[0])
            if place is None:
                self.rewind(self.num_there)

    def rewind(self, num_there: int) -> None:
        self.num_there = self.num_pushed = num_there
        self.num_rewinds += 1
        self.is_stuck |= self.num_rewinds > MAX_REWINDS

    def _choose(self) -> None:
        """Chooses a keep point, or a newer one."""
        point = self.point
        if point is not None and not self._has_all_units and not self._is_kept(point):
            self._use(None)  # the source has evicted it
            self.rewind(0)
            self.is_last = False
        if self.is_switching:
            if not (self.is_last or self.is_in_flight):
                self._choose_last()
            return
        has_begun = point is not None and self.num_pushed > self.num_whole
        has_whole = not self.source.shape.has_whole or self._is_fresh(self.num_there)
        if has_begun or not self._has_prompt or not has_whole:
            return
        if point is None or not self._is_fresh(point.num_blocks):
            newest = newest_point(self.source.worker, self.sequence, self.source.shape)
            if newest is not None and self._is_fresh(newest.num_blocks):
                self._use(newest)

    def _choose_last(self) -> None:
        self.is_last = True
        if self.point is not None and self._is_fresh(self.point.num_blocks):
            return
        newest = newest_point(self.source.worker, self.sequence, self.source.shape)
        if newest is not None:
            self._use(newest)
        self.is_stuck |= self.point is None and not self._is_fresh(0)

    def _use(self, point: KeepPoint | None) -> None:
        if point is self.point:
            return
        self._mark(self.num_whole, self.num_pushed, is_wanted=False)
        for each in self.target.incoming:
            if each is not self:
                each.mark(is_wanted=True)
        self.point, self._parts = point, []
        if point is not None:
            parts = self.source.shape.parts(point.block_hash, point.num_blocks)
            self._parts = [(key_of(each), each) for each in parts]
        self.num_there = self.num_pushed = min(self.num_there, self.num_whole)

    def _is_kept(self, point: KeepPoint) -> bool:
        return self.source.worker.pool.keep_points.get(point.block_hash) is point

    def push(self, most: int) -> list[tuple[Push, Place]]:
        """Returns up to ``most`` rows for the next units that the target lacks."""
        rows: list[tuple[Push, Place]] = []
        inbox, num_wanted = self.target.inbox, self.num_wanted
        while self.num_pushed < num_wanted and len(rows) < most:
            key, part = self.unit(self.num_pushed)
            if not self.target.has(key, part):
                if (place := inbox.find(key)) is not None:
                    if place.is_stale or place.is_sent:
                        break  # the inbox loses it first
                    place.is_wanted = True
                else:
                    block = self._find(key, part)
                    if block is None or inbox.is_full:
                        break
                    push = Push(key, block, self.target.name, part)
                    rows.append((push, inbox.reserve(key, part)))
            self.num_pushed += 1
        return rows

    def _find(self, key: bytes, part: Part | None) -> int | None:
        """The block, or copy of a state, at the source."""
        if part is None:
            block = self.source.worker.index.find(key)
            self.is_stuck |= block is None
            return block
        if self.point is None or not self._is_kept(self.point):
            return None
        return self.source.shape.number_in(self.point, part)

    def mark(self, is_wanted: bool) -> None:
        """Marks the places of its units. Unwanted are also those that the target has computed."""
        self._mark(self.num_there if is_wanted else 0, self.num_pushed, is_wanted=is_wanted)

    def _mark(self, first: int, end: int, *, is_wanted: bool) -> None:
        for number in range(first, end):
            place = self.target.inbox.find(self.unit(number)[0])
            if place is not None and not place.is_guest:
                place.is_wanted = is_wanted

    @property
    def is_overdue(self) -> bool:
        """True if one of its units is overdue."""
        inbox = self.target.inbox
        places = (inbox.find(self.unit(each)[0]) for each in range(self.num_there, self.num_pushed))
        return any(place is not None and inbox.is_overdue(place) for place in places)
