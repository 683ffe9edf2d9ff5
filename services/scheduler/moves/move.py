"""A running sequence on its way to another worker. Pure."""

import sys
from dataclasses import dataclass, field
from typing import Literal, Protocol

from services.scheduler.allocation import Allocation
from services.scheduler.block_pool import KeepPoint
from services.scheduler.moves.delivery import Delivery, Source, Target
from services.scheduler.moves.points import newest_point
from services.scheduler.placement import Placement
from services.scheduler.sequence import Sequence

Why = Literal["leaving", "role"]

NEAR_TOKENS = 32
"""The most tokens computed again after a move with small blocks. Chosen."""


class MoveTarget(Target, Protocol):
    """``num_meant`` of its blocks are for the ``incoming`` moves."""

    incoming: dict["Move", None]
    num_meant: int

    def has_place(self, move: "Move", placement: Placement) -> bool:
        """True if it has room for the sequence now."""


class MoveSource(Source, Protocol):
    """A worker whose sequences move. Some targets are ``avoided`` for a number of looks, as are
    moves of sequences ``tried`` before."""

    moves: dict[Sequence, "Move"]
    avoided: dict[MoveTarget, int]
    tried: dict[Sequence, int]


@dataclass(slots=True, eq=False)
class Move(Delivery):
    """The move of a running sequence. It had ``num_blocks`` at the beginning. ``num_looks`` counts
    the looks since all is there and the target has no room. No plan computes it while it
    ``is_switching``; then they are the looks since a unit has come.

    With windows or states it needs a keep point, which is pushed while the sequence goes on. If
    that is old once it is there, the newest one follows while the sequence waits: ``is_last``."""

    source: MoveSource
    target: MoveTarget
    why: Why
    allocation: Allocation = field(init=False)
    num_blocks: int = field(init=False)
    is_switching: bool = field(default=False, init=False)
    is_last: bool = field(default=False, init=False)

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
        """Counts the units at the target. Between plans."""
        if self.source.shape.has_points:
            self._choose()
        num_before = self.num_there
        self.count()
        if self.is_switching and self.num_there > num_before:
            self.num_looks = 0

    def _choose(self) -> None:
        """Chooses a keep point, or a newer one."""
        point = self.point
        if point is not None and not self._has_all_units and not self._is_kept(point):
            self._change(None)  # the source has evicted it
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
                self._change(newest)

    def _choose_last(self) -> None:
        self.is_last = True
        if self.point is not None and self._is_fresh(self.point.num_blocks):
            return
        newest = newest_point(self.source.worker, self.sequence, self.source.shape)
        if newest is not None:
            self._change(newest)
        self.is_stuck |= self.point is None and not self._is_fresh(0)

    def _change(self, point: KeepPoint | None) -> None:
        if point is self.point:
            return
        self._mark(self.num_whole, self.num_pushed, is_wanted=False)
        for each in self.target.deliveries:
            if each is not self:
                each.mark(is_wanted=True)
        self.point, self._parts = None, []
        if point is not None:
            self._use(point)
        self.num_there = self.num_pushed = min(self.num_there, self.num_whole)
