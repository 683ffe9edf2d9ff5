"""Units of a sequence on their way to another worker, block by block. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from services.scheduler.block_pool import KeepPoint
from services.scheduler.moves.inbox import Place, Places
from services.scheduler.moves.points import PointShape, key_of
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.wire.messages import Inbox, Part, Push

MAX_REWINDS = 3  # a target that evicts units again and again is too full for them


class Target(Protocol):
    """A worker with the inbox ``message`` that takes blocks of others."""

    name: str
    message: Inbox

    @property
    def inbox(self) -> Places: ...

    @property
    def deliveries(self) -> "Iterable[Delivery]":
        """Those that are on their way to it."""

    def has(self, key: bytes, part: Part | None) -> bool:
        """True if the block, or part of a keep point, is in its prefix cache."""

    def has_all(self, delivery: "Delivery") -> bool:
        """True if it has evicted no unit of the delivery meanwhile."""


class Source(Protocol):
    worker: WorkerState
    shape: PointShape


@dataclass(slots=True, eq=False)
class Delivery:
    """The units of ``sequence`` on their way from ``source`` to ``target``: full blocks and then
    parts of a keep ``point``. The first ``num_there`` are in the target's prefix cache, and the
    first ``num_pushed`` are or were on their way. ``is_stuck``: a block is missing at the source.
    """

    sequence: Sequence
    source: Source
    target: Target
    num_there: int = field(default=0, init=False)
    num_pushed: int = field(default=0, init=False)
    num_rewinds: int = field(default=0, init=False)
    num_looks: int = field(default=0, init=False)
    is_stuck: bool = field(default=False, init=False)
    point: KeepPoint | None = field(default=None, init=False)
    _parts: list[tuple[bytes, Part]] = field(default_factory=list, init=False)

    @property
    def num_whole(self) -> int:
        """Counts the units that are full blocks of layers without a window."""
        raise NotImplementedError

    @property
    def num_wanted(self) -> int:
        """Counts the units that the target could use."""
        raise NotImplementedError

    @property
    def end(self) -> int:
        """The number of blocks after which the target can begin once all units are there."""
        raise NotImplementedError

    def unit(self, number: int) -> tuple[bytes, Part | None]:
        if number < self.num_whole:
            return self.sequence.block_hash(number, self.source.shape.block_size), None
        return self._parts[number - self.num_whole]

    def count(self) -> None:
        """Counts the units at the target. Those it has evicted are pushed again. Between plans."""
        num_wanted = self.num_wanted
        while self.num_there < num_wanted and self.target.has(*self.unit(self.num_there)):
            self.num_there += 1
        self.num_pushed = max(self.num_pushed, self.num_there)
        if self.num_pushed > self.num_there:
            place = self.target.inbox.find(self.unit(self.num_there)[0])
            if place is None:
                self.rewind(self.num_there)

    def rewind(self, num_there: int) -> None:
        self.num_there = self.num_pushed = num_there
        self.num_rewinds += 1
        self.is_stuck |= self.num_rewinds > MAX_REWINDS

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

    def mark_left(self) -> None:
        """It is over: only units that others wait for are wanted."""
        self.mark(is_wanted=False)
        for each in self.target.deliveries:
            if each is not self:
                each.mark(is_wanted=True)

    def _mark(self, first: int, end: int, *, is_wanted: bool) -> None:
        for number in range(first, end):
            place = self.target.inbox.find(self.unit(number)[0])
            if place is not None and not place.is_guest:
                place.is_wanted = is_wanted

    def _use(self, point: KeepPoint) -> None:
        parts = self.source.shape.parts(point.block_hash, point.num_blocks)
        self.point, self._parts = point, [(key_of(each), each) for each in parts]

    def _is_kept(self, point: KeepPoint) -> bool:
        return self.source.worker.pool.keep_points.get(point.block_hash) is point

    @property
    def is_overdue(self) -> bool:
        """True if one of its units is overdue."""
        inbox = self.target.inbox
        places = (inbox.find(self.unit(each)[0]) for each in range(self.num_there, self.num_pushed))
        return any(place is not None and inbox.is_overdue(place) for place in places)
