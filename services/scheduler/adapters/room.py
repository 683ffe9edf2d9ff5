"""The adapters that a worker's running sequences may have at once. Pure.

A worker computes with up to ``max_adapters`` different adapters; any number of sequences share one.
A sequence without room for its adapter is passed over, so that others fill the slots.

**Fairness.** A sequence that was passed over in ``PATIENCE`` plans *starves*. While one does, the
adapter with the fewest sequences is *closed*: sequences behind the starved one get neither that
adapter nor one that is not running yet. The closed adapter ends with its last sequence, so room
comes within the time of the longest running text, and no later arrival takes it. Sequences ahead of
the starved one in the order may, but there is a limited number of these.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Set
from weakref import ref

from services.scheduler.resource import Resource
from services.scheduler.sequence import Sequence, WaitReason

PATIENCE = 16
"""Plans that may pass a sequence over: others with adapters that run share their room meanwhile.
Chosen, not measured."""


class AdapterRoom(Resource):
    """Room for ``max_adapters`` of the adapters that the worker has, ``reported`` by it and changed
    outside. ``waits`` tells whether a sequence still waits to be computed."""

    reason = WaitReason.ADAPTER

    def __init__(
        self, reported: Set[str], max_adapters: int, waits: Callable[[Sequence], bool]
    ) -> None:
        self._reported = reported
        self._max_adapters = max_adapters
        self._waits = waits
        self._held: dict[int, str] = {}  # adapters by slot
        self._counts: Counter[str] = Counter()  # of their slots
        self._starved: Callable[[], Sequence | None] = lambda: None  # weak: it holds its images
        self._closed = ""

    @property
    def starved(self) -> Sequence | None:
        first = self._starved()
        return first if first is not None and self._waits(first) and self.fits(first) else None

    def fits(self, sequence: Sequence) -> bool:
        adapter = sequence.options.adapter
        return not adapter or (self._max_adapters > 0 and adapter in self._reported)

    def has_room_for(self, sequence: Sequence, without: Iterable[Sequence] = ()) -> bool:
        adapter = sequence.options.adapter
        if not adapter or adapter in self._counts or len(self._counts) < self._max_adapters:
            return True
        left = Counter(self._held.get(each.allocated.slot, "") for each in without)
        num_ended = sum(left[each] == num for each, num in self._counts.items())
        return len(self._counts) - num_ended < self._max_adapters

    def is_kept_from(self, sequence: Sequence) -> bool:
        adapter, starved = sequence.options.adapter, self._starved()
        if not adapter or starved is None or sequence.order <= starved.order:
            return False
        if adapter != self._closed and adapter in self._counts:
            return False
        return self.starved is not None

    def pass_over(self, sequence: Sequence) -> None:
        if sequence.num_passed_over < PATIENCE or not self.fits(sequence):
            return
        starved = self.starved
        if starved is None or sequence.order < starved.order:
            self._starved = ref(sequence)
        self._close()

    def take(self, sequence: Sequence) -> None:
        if adapter := sequence.options.adapter:
            self._held[sequence.allocated.slot] = adapter
            self._counts[adapter] += 1

    def free(self, slot: int) -> None:
        if adapter := self._held.pop(slot, ""):
            self._counts[adapter] -= 1
            if not self._counts[adapter]:
                del self._counts[adapter]

    def _close(self) -> None:
        """The closed adapter stays the same until it has ended, so that it does end."""
        if self._closed not in self._counts:
            counts = self._counts
            is_full = len(counts) >= self._max_adapters
            self._closed = min(counts, key=lambda each: (counts[each], each)) if is_full else ""
