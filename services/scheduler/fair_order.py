"""Whose turn it is where sequences of several API keys wait. Pure.

A slot goes to the key with the fewest, among equals to the one that got its last slot first. That
holds among sequences of one priority: the first of the queue says which, and nobody is put before
one that it gives way to.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf

from services.scheduler.sequence import Sequence

LAST = inf, 0


class FairOrder:
    """Remembers which owner was admitted when."""

    def __init__(self) -> None:
        self._num_admitted = 0
        self._admitted: dict[str, int] = {}

    def note(self, sequence: Sequence) -> None:
        """It was admitted."""
        self._num_admitted += 1
        self._admitted[sequence.owner] = self._num_admitted

    def in_turn(
        self, lines: Iterable[list[Sequence]], running: Iterable[Sequence]
    ) -> Iterator[Sequence]:
        """``lines`` hold what waits, one for each owner and priority, in order, and do not change
        meanwhile; ``running`` has what holds a slot."""
        held = Counter(each.owner for each in running)
        admitted = self._admitted.copy()
        rest = [iter(line) for line in lines]
        heads = {next(line): line for line in rest}
        while heads:
            level = min(heads, key=_order).priority
            end = min((each.order for each in heads if each.priority < level), default=LAST)
            turn = min(
                (each for each in heads if each.priority == level and each.order < end),
                key=lambda each: (held[each.owner], admitted.get(each.owner, 0), each.order),
            )
            held[turn.owner] += 1
            admitted[turn.owner] = self._num_admitted + held.total()
            yield turn
            line = heads.pop(turn)
            if (head := next(line, None)) is not None:
                heads[head] = line


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
