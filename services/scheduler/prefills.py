"""Shares the token budget left by decoding sequences among prompts. Pure.

A sequence with more tokens to compute than a threshold is *long*. Long ones come last, so that
short prompts overtake them. They share the rest of the budget, and each keeps at least one part in
``max_partial`` of it, so they make progress. Short ones are computed one after the other, each as
far as the budget goes: computing two side by side would only delay the first.
"""

from dataclasses import dataclass

from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

MAX_LOOKED_UP = 16
"""The most long prompts of the waiting queue one plan looks up in the prefix cache; the rest count
as not cached. With 2000 cached blocks each this takes some 30 ms, once: later plans look up only
the first missing block."""


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """At most ``max_partial`` sequences are partly through their prompt, at most ``max_long`` of
    them long. A sequence with more than ``long_threshold`` tokens to compute is long; 0 stands for
    the token budget of the worker."""

    max_partial: int = 2
    max_long: int = 1
    long_threshold: int = 0

    def threshold(self, worker: WorkerState) -> int:
        return self.long_threshold or worker.capacity.max_num_batched_tokens

    def has_room_for(self, sequence: Sequence, worker: WorkerState) -> bool:
        """True if ``sequence`` is short on ``worker`` or another long one may run there, not
        counting sequences that yield to it or await data."""
        threshold = self.threshold(worker)
        num_tokens = sequence.num_to_compute - threshold
        if num_tokens <= 0:
            return True
        num_long = sum(
            each.num_to_compute > threshold
            and not each.awaits_data
            and not each.yields_to(sequence)
            for each in worker.running.values()
        )
        return num_long < self.max_long or worker.has_cached(sequence, num_tokens)


class Prefills:
    """The prompts of one plan, after its decoding sequences have their tokens; for the first or the
    later sequences."""

    def __init__(self, limits: PrefillLimits, worker: WorkerState, builder: PlanBuilder) -> None:
        self.longs: list[Sequence] = []
        self._limits = limits
        self._worker = worker
        self._builder = builder
        self._threshold = limits.threshold(worker)
        self._part = max(1, builder.budget // limits.max_partial)
        self._num_short = 0  # partly computed after this plan
        self._num_looked_up = 0

    @property
    def is_full(self) -> bool:
        return self._builder.is_full or not self.budget

    @property
    def budget(self) -> int:
        """The tokens left for short ones."""
        kept = sum(min(self._part, self._builder.max_tokens(each)) for each in self.longs)
        return max(0, self._builder.budget - kept)

    def add(self, sequences: list[Sequence]) -> None:
        """Computes the short ones among the running ``sequences``, oldest first. The long ones are
        computed by ``finish``."""
        self.longs += [each for each in sequences if each.num_to_compute > self._threshold]
        for sequence in sequences:
            if sequence.num_to_compute <= self._threshold:
                self._compute(sequence)

    def may_admit(self, sequence: Sequence) -> bool:
        """True if ``sequence`` is short or another long one may run."""
        return len(self.longs) < self._limits.max_long or not self._is_long(sequence)

    def has_room_for(self, sequence: Sequence) -> bool:
        """True if one more sequence may be partly computed, or this step completes its prompt."""
        if len(self.longs) + self._num_short < self._limits.max_partial:
            return True
        is_short = self._num_lacking(sequence) <= min(self.budget, self._threshold)
        return is_short and self._builder.max_tokens(sequence) == sequence.num_to_compute

    def admit(self, sequence: Sequence) -> None:
        """Computes ``sequence``, which has just been given its slot, if it is not loading."""
        self._builder.admit(sequence)
        if not sequence.allocated.is_held:
            self.add([sequence])

    def finish(self) -> None:
        """Shares the rest of the budget among the long ones."""
        for number, sequence in enumerate(sorted(self.longs, key=_num_to_compute)):
            num_left = len(self.longs) - number
            self._builder.compute(sequence, -(-self._builder.budget // num_left))

    def _compute(self, sequence: Sequence) -> None:
        self._builder.compute(sequence, self.budget)
        self._num_short += sequence.num_to_compute > 1

    def _is_long(self, sequence: Sequence) -> bool:
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
