"""The order in which a prefix cache evicts its units. Pure.

The least recently used unit goes first. More chats in turn than there is room for would then find
nothing at all, since each returns just after its end. So the names of evicted units are remembered.
A prefix missed for a second time is cached in passing: its eviction comes before all others, and
some of the others are still there at the return of their chats. One in ``NUM_IN_TURN`` of such
prefixes is cached as usual, against prefixes without further use. ``benchmarks.evictions`` compares
both orders.
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
    are remembered."""

    def __init__(self, max_evicted: int) -> None:
        self._usual: dict[Unit, _Place] = {}
        self._passing: dict[Unit, _Place] = {}
        self._evicted: dict[bytes, bool] = {}  # True if it was missed before
        self._max_evicted = max_evicted
        self._num_passing = 0

    def __bool__(self) -> bool:
        return bool(self._usual or self._passing)

    @property
    def has_evicted(self) -> bool:
        return bool(self._evicted)

    def put(self, unit: Unit, name: bytes, standing: Standing) -> None:
        """Notes the last use of ``unit``."""
        self.discard(unit)
        units = self._passing if standing is Standing.PASSING else self._usual
        units[unit] = _Place(name, standing is not Standing.USUAL)

    def discard(self, unit: Unit) -> None:
        """Does nothing for an uncached unit."""
        self._usual.pop(unit, None)
        self._passing.pop(unit, None)

    def pop(self) -> Unit:
        """Removes the unit to evict."""
        unit = next(iter(self._passing or self._usual))
        self.evict(unit)
        return unit

    def evict(self, unit: Unit) -> None:
        """Removes a cached unit, before its turn or in it."""
        units = self._passing if unit in self._passing else self._usual
        name, is_missed = units.pop(unit)
        self._evicted[name] = is_missed
        if len(self._evicted) > self._max_evicted:
            del self._evicted[next(iter(self._evicted))]

    def clear(self) -> None:
        self._usual.clear()
        self._passing.clear()
        self._evicted.clear()

    def standing_of(self, missed: Iterable[bytes]) -> Standing:
        """The standing of a new sequence; ``missed`` are the names behind its hit."""
        found = [self._evicted.pop(name) for name in missed if name in self._evicted]
        if not found:
            return Standing.USUAL
        if not any(found):
            return Standing.MISSED
        self._num_passing += 1
        return Standing.PASSING if self._num_passing % NUM_IN_TURN else Standing.MISSED
