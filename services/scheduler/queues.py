"""Sequences without a slot, in the order of admission."""

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from math import inf

from services.scheduler.sequence import Sequence, WaitReason

NUM_LOOKED_AT = 256
"""The number of sequences a plan looks at from the head of a queue, and again further on: each
takes one or two microseconds, so a plan must not look at all of a long queue."""

LAST = inf, 0


class FairOrder:
    """Order of admission among API keys (owners), by the last admission of each.

    A slot goes to the key with the fewest slots, among equals to the key with the oldest last
    admission. The rule applies within the priority of the first sequence in the queue: no sequence
    overtakes one of an earlier priority.
    """

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


class WaitingQueue:
    """Sequences sorted by ``order``, which is constant while a sequence waits."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._lines: dict[tuple[str, int], list[Sequence]] = {}  # by owner and priority
        self._owners: Counter[str] = Counter()
        self._fair_order = FairOrder()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over a copy: sequences may leave meanwhile."""
        return iter(self._sequences[:])

    def __contains__(self, sequence: Sequence) -> bool:
        index = bisect_left(self._sequences, sequence.order, key=_order)
        return index < len(self._sequences) and self._sequences[index] is sequence

    def first_where(self, condition: Callable[[Sequence], bool]) -> Sequence | None:
        """Returns the first of the first ``NUM_LOOKED_AT`` sequences that meets ``condition``."""
        return next(filter(condition, islice(self._sequences, NUM_LOOKED_AT)), None)

    def each_where(self, condition: Callable[[Sequence], bool], start: int) -> Iterator[Sequence]:
        """Yields the sequences that meet ``condition``, of the first ``NUM_LOOKED_AT`` and of
        equally many from ``start`` on. Each may be removed before the next is asked for."""
        places = self._from(0), self._from(max(start, NUM_LOOKED_AT))
        return filter(condition, chain(*places))

    def _from(self, index: int) -> Iterator[Sequence]:
        """Yields up to ``NUM_LOOKED_AT`` sequences. The caller may remove each."""
        end = index + NUM_LOOKED_AT
        while index < min(end, len(self._sequences)):
            sequence = self._sequences[index]
            yield sequence
            if index < len(self._sequences) and self._sequences[index] is sequence:
                index += 1

    def each_in_turn(
        self, condition: Callable[[Sequence], bool], start: int, running: Iterable[Sequence]
    ) -> Iterator[Sequence]:
        """As ``each_where``, with the first ones in turn of their owners (``FairOrder``), given the
        ``running`` sequences."""
        if len(self._owners) <= 1:
            return self.each_where(condition, start)
        in_turn = self._fair_order.in_turn(self._lines.values(), running)
        first, others = islice(in_turn, NUM_LOOKED_AT), self._from(max(start, NUM_LOOKED_AT))
        return filter(condition, chain(first, others))

    def leader_of(self, sequence: Sequence) -> Sequence | None:
        """Returns the first of the first ``NUM_LOOKED_AT`` sequences that ``sequence`` yields
        to."""
        for each in islice(self._sequences, NUM_LOOKED_AT):
            if each.order > sequence.order:
                break
            if sequence.yields_to(each):
                return each
        return None

    def num_before(self, sequence: Sequence) -> int:
        return bisect_left(self._sequences, sequence.order, key=_order)

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_order)
        insort(self._lines.setdefault(_line(sequence), []), sequence, key=_order)
        self._owners[sequence.options.owner] += 1

    def try_remove(self, sequence: Sequence) -> bool:
        """Returns False if the sequence is not in this queue."""
        if not _try_remove(self._sequences, sequence):
            return False
        line = self._lines[_line(sequence)]
        _try_remove(line, sequence)
        if not line:
            del self._lines[_line(sequence)]
        self._owners[sequence.options.owner] -= 1
        if not self._owners[sequence.options.owner]:
            del self._owners[sequence.options.owner]
        return True

    def admit(self, sequence: Sequence) -> None:
        """Removes a sequence that gets a slot."""
        self.try_remove(sequence)
        self._fair_order.note(sequence)


class Queues:
    """Every sequence without a slot, in the queue for its state.

    ``paused``: without credit, not computed. ``isolated``: a worker died under it, computed alone.
    ``waiting``: all others. ``on_return`` is called with each sequence that lost its slot, and the
    reason.
    """

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        self.isolated = WaitingQueue()
        self.paused = WaitingQueue()
        self.on_return: Callable[[Sequence, WaitReason], None] = lambda sequence, why: None

    def __len__(self) -> int:
        return len(self.waiting) + len(self.isolated) + len(self.paused)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self.waiting, self.isolated, self.paused)

    @property
    def num_runnable(self) -> int:
        """The number of sequences that would be computed if they had a slot."""
        return len(self.waiting) + len(self.isolated)

    def put(self, sequence: Sequence) -> None:
        if not sequence.has_credit:
            self.paused.add(sequence)
        elif sequence.is_isolated:
            self.isolated.add(sequence)
        else:
            self.waiting.add(sequence)

    def put_back(self, sequence: Sequence, why: WaitReason) -> None:
        """Takes a sequence that lost its slot."""
        self.put(sequence)
        sequence.num_passed_over, sequence.wait_reason = 0, None
        self.on_return(sequence, why)

    def remove(self, sequence: Sequence) -> None:
        for queue in (self.waiting, self.isolated, self.paused):
            if queue.try_remove(sequence):
                return

    def resume(self, sequence: Sequence) -> None:
        """Moves a paused sequence with new credit to its queue."""
        if sequence.has_credit and self.paused.try_remove(sequence):
            self.put(sequence)


def _line(sequence: Sequence) -> tuple[str, int]:
    return sequence.options.owner, sequence.options.priority


def _try_remove(sequences: list[Sequence], sequence: Sequence) -> bool:
    index = bisect_left(sequences, sequence.order, key=_order)
    is_here = index < len(sequences) and sequences[index] is sequence
    if is_here:
        del sequences[index]
    return is_here


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
