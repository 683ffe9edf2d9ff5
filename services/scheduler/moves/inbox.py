"""The places of a worker's inbox, counted by its scheduler. Pure."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Series
from dataclasses import dataclass

from services.scheduler.moves.points import ComingPoints
from services.scheduler.worker_state import LOOK_S, WorkerState
from shared.errors import CodecError
from shared.wire.messages import Discard, Inbox, Part, PlanRow, Take

TRANSFER_S = 5.0  # until a pushed block is overdue. Chosen
FORGET_S = 30.0  # until the place of a block that never came is free again. Chosen
MAX_COPY_BYTES = 8 << 20
"""Of the pushes of a plan, and of its takes: streams wait meanwhile. Chosen."""
MAX_ROWS = 256  # of a plan


@dataclass(slots=True, eq=False)
class Place:
    """The place of a block, from the row that pushes it to the result of the row that takes or
    discards it. ``has_left``: the plan with the push has run, or never will; ``num_looks`` counts
    the looks at it since. ``is_stale``: its content must not be used any more. ``is_guest``: it is
    of another cell. It may come again after its row, as a guest or not. The block may be a ``part``
    of a keep point."""

    is_wanted: bool = True
    is_stale: bool = False
    has_left: bool = False
    has_arrived: bool = False
    is_sent: bool = False
    comes_again_as: bool | None = None
    is_guest: bool = False
    num_looks: int = 0
    part: Part | None = None

    @property
    def is_usable(self) -> bool:
        return self.is_wanted and not self.is_stale and not self.is_sent


class Places:
    """The ``num_places`` of an inbox that one scheduler counts."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._places: dict[bytes, Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def is_full(self) -> bool:
        return len(self._places) >= self.num_places

    def find(self, key: bytes) -> Place | None:
        return self._places.get(key)

    def reserve(self, key: bytes, part: Part | None = None) -> Place:
        """Returns the place of a block that is pushed by the next plan of another worker."""
        place = self._places[key] = Place(part=part)
        return place

    def free(self, key: bytes) -> Place | None:
        return self._places.pop(key, None)

    def spoil(self, keys: Iterable[bytes] | None = None) -> None:
        """The blocks ``keys``, and the parts of keep points there, must not be used; or all that
        are on their way."""
        wrong = None if keys is None else {*keys}
        for key, place in self._places.items():
            name = key if place.part is None else place.part.point
            place.is_stale |= wrong is None or name in wrong

    def look(self) -> bool:
        """Called every ``LOOK_S``. Returns True if a wanted block is overdue."""
        is_overdue = False
        for key, place in [*self._places.items()]:
            if place.is_sent or not (place.has_left or place.is_guest):
                continue
            place.num_looks += 1
            if self.is_overdue(place):
                is_overdue |= place.is_wanted
                place.is_wanted &= not place.is_guest  # its sequence has stayed elsewhere
            if not place.has_arrived and place.num_looks * LOOK_S >= FORGET_S:
                del self._places[key]
        return is_overdue

    def is_overdue(self, place: Place) -> bool:
        return place.num_looks * LOOK_S >= TRANSFER_S


class InboxPlaces(Places):
    """The inbox of ``worker`` as ``message`` describes it. Parts of keep points are collected by
    ``points``. Guests are kept if it ``wants_guests``."""

    def __init__(self, worker: WorkerState, message: Inbox, points: ComingPoints) -> None:
        super().__init__(message.num_blocks)
        self.worker = worker
        self.max_copies = max(1, min(MAX_ROWS, MAX_COPY_BYTES // message.block_bytes))
        self.wants_guests = False
        self._points = points
        self._num_guests, self._num_guests_here = message.num_guests, 0
        self._arrived: dict[bytes, Place] = {}  # without a row yet
        self._sent: deque[tuple[int, list[bytes]]] = deque()  # rows without a result, by step

    @property
    def is_full(self) -> bool:
        return len(self) - self._num_guests_here >= self.num_places

    @property
    def has_arrived(self) -> bool:
        """True if it has blocks without a row yet."""
        return bool(self._arrived)

    def arrive(
        self, keys: Series[bytes], are_guests: bool = False, parts: Series[Part | None] = ()
    ) -> None:
        """Raises CodecError for more blocks than there are places."""
        is_wanted = are_guests and self.wants_guests
        for key, part in zip(keys, parts or [None] * len(keys), strict=True):
            place = self._places.get(key)
            if place is None:
                place = Place(is_wanted=is_wanted, is_guest=are_guests, part=part)
                self._places[key] = place
                self._num_guests_here += are_guests
            if place.is_sent:
                place.comes_again_as = are_guests
            else:
                place.has_arrived = True
                self._arrived[key] = place
        num_guests = sum(each.is_guest for each in self._arrived.values())
        num_own = len(self._arrived) - num_guests
        if num_own > self.num_places or num_guests > self._num_guests:
            raise CodecError(
                f"an inbox of {self.num_places} places and {self._num_guests} for guests has"
                f" {num_own} and {num_guests}"
            )

    def rows(self, step: int) -> list[PlanRow]:
        """Takes wanted blocks to the prefix cache, and discards the other ones. The worker runs
        these rows first: a block is in the cache before the plan's step, and before a store saves
        it."""
        rows: list[PlanRow] = []
        sent: list[bytes] = []
        for key, place in [*self._arrived.items()]:
            if len(rows) == self.max_copies:
                break
            is_here = self.has(key, place.part)
            if not place.is_usable or is_here:
                rows.append(Discard(key, is_cached=is_here and not place.is_stale))
            elif (block := self._take(key, place.part)) is not None:
                rows.append(Take(key, block, place.part))
            else:
                continue  # no block of the cache is free
            del self._arrived[key]
            place.is_sent = True
            sent.append(key)
        if sent:
            self._sent.append((step, sent))
        return rows

    def has(self, key: bytes, part: Part | None) -> bool:
        """True if the cache has the block, or part of a keep point."""
        if part is not None:
            return self._points.has(part)
        return self.worker.index.find(key) is not None

    def _take(self, key: bytes, part: Part | None) -> int | None:
        """Returns the block of the cache that gets the content: cached, without an owner."""
        if part is not None:
            return self._points.take(part)
        pool = self.worker.pool
        if (blocks := pool.try_allocate(1)) is None:
            return None
        self.worker.index.add(key, blocks[0])
        pool.free(blocks)
        return blocks[0]

    def finish(self, step: int) -> None:
        """The rows of ``step`` have run: their keys may be pushed again."""
        if not self._sent or self._sent[0][0] != step:
            return
        for key in self._sent.popleft()[1]:
            place = self._places.pop(key)
            self._num_guests_here -= place.is_guest
            if place.comes_again_as is not None:
                self.arrive([key], place.comes_again_as, [place.part])
