"""The order in which a prefix cache evicts its units. Pure.

The least recently used unit goes first. More chats in turn than there is room for would then find
nothing at all, since each returns just after its end. So the names of evicted units are remembered.
A prefix missed for a second time is cached in passing: its eviction comes before all others, and
some of the others are still there at the return of their chats. One in ``NUM_IN_TURN`` of such
prefixes is cached as usual, against prefixes without further use. ``benchmarks.evictions`` compares
both orders.

A client may ask for a time after the last use (``retention_s``). Until it has passed, its units are
evicted after all others; then they are evicted first. The longest time asked for a unit counts.
"""

from collections.abc import Hashable, Iterable
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

NUM_IN_TURN = 3

Unit = TypeVar("Unit", bound=Hashable)


class Standing(IntEnum):
    """The standing of the units of a sequence."""

    USUAL = 0
    MISSED = 1  # its prefix was evicted before it came
    PASSING = 2  # and before that too


class _Place(NamedTuple):
    name: bytes
    is_missed: bool


class Eviction(Generic[Unit]):
    """Cached units in the order of their eviction. The names of up to ``max_evicted`` evicted ones
    are remembered, and up to ``max_retained`` units are kept for a time."""

    def __init__(self, max_evicted: int, max_retained: int = 0) -> None:
        self._passing: dict[Unit, _Place] = {}
        self._usual: dict[Unit, _Place] = {}
        self._retained: dict[Unit, _Place] = {}
        self._until_s: dict[bytes, float] = {}  # by name
        self._evicted: dict[bytes, bool] = {}  # True if it was missed before
        self._max_evicted, self._max_retained = max_evicted, max_retained
        self._num_passing = 0
        self._now_s = 0.0  # since the beginning, by ``pass_time``

    def __bool__(self) -> bool:
        return bool(self._passing or self._usual or self._retained)

    @property
    def num_retained(self) -> int:
        return len(self._retained)

    @property
    def has_evicted(self) -> bool:
        return bool(self._evicted)

    def put(self, unit: Unit, name: bytes, standing: Standing, retention_s: float = 0) -> None:
        """Notes the last use of ``unit``."""
        self.discard(unit)
        if name in self._until_s or (retention_s and len(self._until_s) < self._max_retained):
            until_s = self._now_s + retention_s
            self._until_s[name] = max(until_s, self._until_s.get(name, until_s))
            units = self._retained
        else:
            units = self._passing if standing is Standing.PASSING else self._usual
        units[unit] = _Place(name, standing is not Standing.USUAL)

    def pass_time(self, seconds: float) -> None:
        self._now_s += seconds
        for name in [name for name, until_s in self._until_s.items() if until_s <= self._now_s]:
            del self._until_s[name]
        over = [unit for unit, (name, _) in self._retained.items() if name not in self._until_s]
        self._passing |= {unit: self._retained.pop(unit) for unit in over}

    def rank(self, unit: Unit) -> int:
        """All units of a lower rank are evicted before those of a higher one."""
        return 0 if unit in self._passing else 1 if unit in self._usual else 2

    def discard(self, unit: Unit) -> None:
        """Does nothing for an uncached unit."""
        for units in (self._passing, self._usual, self._retained):
            units.pop(unit, None)

    def pop(self) -> Unit:
        """Removes the unit to evict."""
        unit = next(iter(self._passing or self._usual or self._retained))
        self.evict(unit)
        return unit

    def evict(self, unit: Unit) -> None:
        """Removes a cached unit, before its turn or in it."""
        units = (self._passing, self._usual, self._retained)[self.rank(unit)]
        name, is_missed = units.pop(unit)
        self._until_s.pop(name, None)
        self._evicted[name] = is_missed
        if len(self._evicted) > self._max_evicted:
            del self._evicted[next(iter(self._evicted))]

    def clear(self) -> None:
        for each in (self._passing, self._usual, self._retained, self._until_s, self._evicted):
            each.clear()

    def standing_of(self, missed: Iterable[bytes]) -> Standing:
        """The standing of a new sequence; ``missed`` are the names behind its hit."""
        found = [self._evicted.pop(name) for name in missed if name in self._evicted]
        if not found:
            return Standing.USUAL
        if not any(found):
            return Standing.MISSED
        self._num_passing += 1
        return Standing.PASSING if self._num_passing % NUM_IN_TURN else Standing.MISSED
