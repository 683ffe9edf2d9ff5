"""How the prompts of one step share what its decoding sequences leave of the budget. Pure.

A sequence is *long* while it lacks more than so many tokens. Long ones come last, so that a short
prompt overtakes them: they share what the others leave, which is one part in ``max_partial`` of the
budget for each of them at least, so that they end too. Short ones are computed in order, each as
far as it goes: two of them side by side would only both be late.
"""

from dataclasses import dataclass

from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

MAX_LOOKED_UP = 16
"""Long prompts in the waiting queue of which a plan looks up how much of them is cached; any more
count as long. With 2000 cached blocks each that takes some 30 ms, but once: later plans ask for the
block alone that was missing."""


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """Sequences that may be in the middle of their prompt, how many of them long, and how many
    tokens are not yet long; 0: what one step of the worker computes."""

    max_partial: int = 2
    max_long: int = 1
    long_threshold: int = 0

    def threshold(self, worker: WorkerState) -> int:
        return self.long_threshold or worker.capacity.max_num_batched_tokens

    def has_room_for(self, sequence: Sequence, worker: WorkerState) -> bool:
        """Whether it is not long there, or too few of those that run are."""
        threshold = self.threshold(worker)
        num_long = sum(each.num_to_compute > threshold for each in worker.running.values())
        num_tokens = sequence.num_to_compute - threshold
        return num_long < self.max_long or worker.has_cached(sequence, num_tokens)


class Prefills:
    """Those of one plan, whose decoding sequences have been computed."""

    def __init__(self, limits: PrefillLimits, worker: WorkerState, builder: PlanBuilder) -> None:
        self.longs: list[Sequence] = []
        self._limits = limits
        self._worker = worker
        self._builder = builder
        self._threshold = limits.threshold(worker)
        self._part = max(1, builder.budget // limits.max_partial)
        self._num_short = 0  # in the middle when this plan has run
        self._num_looked_up = 0

    @property
    def is_full(self) -> bool:
        return self._builder.is_full or not self.budget

    @property
    def budget(self) -> int:
        """What is left for those that are not long."""
        kept = sum(min(self._part, self._builder.max_tokens(each)) for each in self.longs)
        return max(0, self._builder.budget - kept)

    def add(self, sequences: list[Sequence]) -> None:
        """Sequences that run, oldest first: what is short among them is computed."""
        self.longs += [each for each in sequences if each.num_to_compute > self._threshold]
        for sequence in sequences:
            if sequence.num_to_compute <= self._threshold:
                self._compute(sequence)

    def may_enter(self, sequence: Sequence) -> bool:
        """Whether there are too few long ones for it to be passed over."""
        return len(self.longs) < self._limits.max_long or not self._is_long(sequence)

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether it may remain in the middle, or need not."""
        if len(self.longs) + self._num_short < self._limits.max_partial:
            return True
        is_short_of_blocks = self._num_lacking(sequence) <= min(self.budget, self._threshold)
        return is_short_of_blocks and self._builder.max_tokens(sequence) == sequence.num_to_compute

    def enter(self, sequence: Sequence) -> None:
        """It has just got its place."""
        self._builder.admit(sequence)
        self.add([sequence])

    def finish(self) -> None:
        """The long ones get all that is left; what one does not need is for the others."""
        for number, sequence in enumerate(sorted(self.longs, key=_num_to_compute)):
            num_left = len(self.longs) - number
            self._builder.compute(sequence, -(-self._builder.budget // num_left))

    def _compute(self, sequence: Sequence) -> None:
        self._builder.compute(sequence, self.budget)
        self._num_short += sequence.num_to_compute > 1

    def _is_long(self, sequence: Sequence) -> bool:
        """Of one that waits."""
        num_tokens = sequence.num_to_compute - self._threshold
        if num_tokens <= 0:
            return False
        if self._worker.is_known_miss(sequence, num_tokens) or self._num_looked_up == MAX_LOOKED_UP:
            return True
        self._num_looked_up += 1
        return not self._worker.has_cached(sequence, num_tokens)

    def _num_lacking(self, sequence: Sequence) -> int:
        return sequence.num_to_compute - self._worker.num_cached(sequence)


def _num_to_compute(sequence: Sequence) -> int:
    return sequence.num_to_compute
