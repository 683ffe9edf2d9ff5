"""Copies between a worker's store and the one on a disk below it. Pure.

**Spills.** A block or state goes to the disk when its place in memory is overwritten, unless too
many others are on their way there: a slow disk loses some. Chats in turn, more than memory has room
for, have no block that was used twice there, so that all are spilled.

**Fetches.** The worker reads a place on a thread of its own, and holds the bytes for a load. The
loaded block is saved in memory again, as any block that is new in the prefix cache.

**Forgotten places.** The thread that writes clears them, without an answer of its own: the ones of
a plan are clear when a spill of the plan, or of a later one, is answered.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from services.scheduler.allocation import Allocation
from services.scheduler.sequence import Sequence as Request
from services.scheduler.stores.index import Location, Places, Store
from services.scheduler.stores.saves import MAX_COPIES, MAX_COPY_BYTES
from shared.errors import CodecError
from shared.wire.messages import (
    MAX_DISK_BYTES,
    Fetch,
    Fetched,
    PlanRow,
    Spill,
    Spilled,
    Unfetch,
)


@dataclass(slots=True, eq=False)
class Held:
    """A sequence with a slot, and the number of its blocks and states to load. The cache was reset
    meanwhile if it ``is_stale``."""

    sequence: Request
    allocation: Allocation
    num_left: int = 0
    is_stale: bool = False


class Copy(NamedTuple):
    """A block to load, or the state of a ``slot`` to its copy ``number``; from a disk it is to be
    fetched first."""

    held: Held
    key: bytes
    number: int
    store: str
    places: Places
    place: int
    slot: int | None = None
    is_on_disk: bool = False


@dataclass(slots=True)
class _Spills:
    """Of a plan without an answer."""

    step: int
    saves: dict[bytes, tuple[Places, int]] = field(default_factory=dict)


class DiskCopies:
    """Of a worker that spills from ``memory`` to ``store`` in ``location``."""

    def __init__(self, location: Location, store: Store, memory: Store) -> None:
        self.location, self.store = location, store
        store.owner = self
        self.to_fetch: deque[Copy] = deque()
        self.clearing: deque[tuple[int, Places, list[int]]] = deque()  # to clear, by step
        self._memory = memory
        self._fetching: deque[tuple[int, list[Copy]]] = deque()
        self._unfetch: list[PlanRow] = []
        self._num_fetched_bytes = 0  # until a plan has the load
        self._spills: list[PlanRow] = []
        self._spilling: deque[_Spills] = deque()
        self._saves: dict[bytes, tuple[Places, int]] = {}  # of the next plan
        self._num_spilled_bytes = 0
        self._is_down = False
        for above, below in zip(memory.parts, store.parts, strict=True):
            above.on_evict = partial(self._spill, above, below)

    @property
    def has_rows(self) -> bool:
        return bool((self.to_fetch and self._has_room) or self._unfetch)

    @property
    def num_awaited(self) -> int:
        """Counts the plans without an answer, and the copies without a plan."""
        return len(self.to_fetch) + len(self._fetching) + len(self._spilling)

    # --- spills ---------------------------------------------------------------------------------

    def _spill(self, above: Places, below: Places, key: bytes, place: int) -> None:
        """The next plan overwrites ``place``."""
        if (found := self.location.find(key)) is not None:
            found[1].use(key)
            return
        num_bytes = self._num_spilled_bytes + below.place_bytes
        is_full = self._num_spilled_bytes and num_bytes > MAX_DISK_BYTES
        if is_full or self._is_down or key in self.location.saving:
            return
        on_disk = below.take()
        if on_disk is None:
            return
        self._num_spilled_bytes = num_bytes
        self._saves[key] = self.location.saving[key] = below, on_disk
        self._spills.append(Spill(key, above.first + place, below.first + on_disk))

    def spills(self, step: int) -> list[PlanRow]:
        """Of places that the plan ``step`` overwrites."""
        rows, self._spills = self._spills, []
        if rows:
            self._spilling.append(_Spills(step, self._saves))
            self._saves = {}
        return rows

    def note_spilled(self, spilled: Spilled) -> None:
        """Raises CodecError if no plan has such an answer."""
        unsaved = {*spilled.unsaved}
        spills = self._spilling[0] if self._spilling else None
        if spills is None or spills.step != spilled.step or not unsaved <= spills.saves.keys():
            raise CodecError(f"a Spilled of step {spilled.step}, which has none, or other keys")
        self._spilling.popleft()
        self._is_down = self._is_down or spilled.is_down
        while self.clearing and self.clearing[0][0] <= spilled.step:
            step, places, cleared = self.clearing.popleft()
            places.note_cleared(cleared, step)
        self._num_spilled_bytes -= sum(each.place_bytes for each, _ in spills.saves.values())
        self.location.note_saves(spills.saves, unsaved)

    # --- fetches --------------------------------------------------------------------------------

    @property
    def num_bytes_ahead(self) -> int:
        """Counts the bytes to fetch, and the fetched ones that await a load."""
        return self._num_fetched_bytes + sum(each.places.place_bytes for each in self.to_fetch)

    @property
    def _has_room(self) -> bool:
        num_bytes = self._num_fetched_bytes
        return not num_bytes or num_bytes + self.to_fetch[0].places.place_bytes <= MAX_DISK_BYTES

    def fetches(self, step: int) -> Sequence[PlanRow]:
        unfetch, self._unfetch = self._unfetch, []
        copies = [*self._next()]
        if copies:
            self._fetching.append((step, copies))
        return [*unfetch, *(Fetch(each.key, each.store, each.place) for each in copies)]

    def _next(self) -> Iterator[Copy]:
        num, num_bytes = 0, 0
        while self.to_fetch and num < MAX_COPIES and self._has_room:
            size = self.to_fetch[0].places.place_bytes
            if num and num_bytes + size > MAX_COPY_BYTES:
                return
            num, num_bytes = num + 1, num_bytes + size
            self._num_fetched_bytes += size
            yield self.to_fetch.popleft()

    def note_fetched(self, fetched: Fetched) -> tuple[list[Copy], list[Copy]]:
        """Returns the copies that the worker holds, and the lost ones. Raises CodecError if no plan
        has such an answer."""
        lost = {*fetched.lost}
        step, copies = self._fetching[0] if self._fetching else (None, [])
        if step != fetched.step or not lost <= {each.key for each in copies}:
            raise CodecError(f"a Fetched of step {fetched.step}, which has none, or other keys")
        self._fetching.popleft()
        missing = [each for each in copies if each.key in lost]
        self.note_load(missing)
        return [each for each in copies if each.key not in lost], missing

    def note_load(self, copies: Sequence[Copy]) -> None:
        """The worker holds these no more."""
        self._num_fetched_bytes -= sum(each.places.place_bytes for each in copies)

    def unfetch(self, copy: Copy) -> None:
        """Nobody waits any more for a copy that the worker holds."""
        self.note_load([copy])
        self._unfetch.append(Unfetch(copy.key))

    # --- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        for spills in self._spilling:
            for key in spills.saves:
                self.location.end_save(key)
        fetching = [each for _, copies in self._fetching for each in copies]
        for each in (*self.to_fetch, *fetching):
            each.places.unpin(each.key)
        for part in self._memory.parts:
            part.on_evict = None
        if self.store.owner is self:
            self.store.owner = None
