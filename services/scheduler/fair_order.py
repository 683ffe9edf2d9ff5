"""Order of admission among API keys. Pure.

A slot goes to the key with the fewest slots, among equals to the key with the oldest last
admission. The rule applies within the priority of the first sequence in the queue: no sequence
overtakes one of an earlier priority.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from services.scheduler.sequence import Sequence

LAST = inf, 0


class FairOrder:
    """Remembers the last admission of each owner."""

    def __init__(self) -> None:
        self._num_admitted = 0
        self._admitted: dict[str, int] = {}

    def note(self, sequence: Sequence) -> None:
        """Must be called at each admission."""
        self._num_admitted += 1
        self._admitted[sequence.options.owner] = self._num_admitted

    def in_turn(
        self, lines: Iterable[list[Sequence]], running: Iterable[Sequence]
    ) -> Iterator[Sequence]:
        """Yields waiting sequences in turn of their owners. Each of ``lines`` is sorted and has one
        owner and one priority; it may lose sequences meanwhile. Sequences in ``running`` hold a
        slot."""
        held = Counter(each.options.owner for each in running)
        admitted = self._admitted.copy()
        heads = {line[0]: line for line in lines}
        while heads:
            level = min(heads, key=_order).options.priority
            end = min((each.order for each in heads if each.options.priority < level), default=LAST)
            turn = min(
                (each for each in heads if each.options.priority == level and each.order < end),
                key=lambda each: (
                    held[each.options.owner],
                    admitted.get(each.options.owner, 0),
                    each.order,
                ),
            )
            held[turn.options.owner] += 1
            admitted[turn.options.owner] = self._num_admitted + held.total()
            yield turn
            line = heads.pop(turn)
            index = bisect_right(line, turn.order, key=_order)
            if index < len(line):
                heads[line[index]] = line


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
