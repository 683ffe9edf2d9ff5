"""Sequences of a later priority in the steps of earlier ones. Pure.

A plan first computes its *first* sequences, which yield to no other. The *later* ones may join it.
"""

from services.scheduler.queues import WaitingQueue
from services.scheduler.sequence import Sequence
from shared.wire.messages import StepPlan, StepResult


class PriorityGroups:
    """Splits runnable sequences, given oldest first, into those with priority (``first``) and those
    that yield to one of them or to a waiting one (``later``). ``has_later``: there are later
    sequences, running or waiting. ``is_past``: the first ones are planned."""

    def __init__(self, running: list[Sequence], waiting: WaitingQueue) -> None:
        self.first: list[Sequence] = []
        self.later: list[Sequence] = []
        self.has_later = self.is_past = False
        leader = waiting.leader_of(running[-1]) if running else None
        self._heads = [leader] if leader is not None else []
        if leader is None and len({each.options.priority for each in running}) <= 1:
            self.first, self._heads = running, running[:1]  # none yields: skip the loop
            return
        for sequence in running:
            if self.leads(sequence):
                self.later.append(sequence)
            else:
                self.first.append(sequence)
                self.admit(sequence)
        self.has_later = bool(self.later)

    def admit(self, sequence: Sequence) -> None:
        """Adds a computed sequence."""
        if not self.is_past and not any(
            each.options.priority <= sequence.options.priority and each.order < sequence.order
            for each in self._heads
        ):
            self._heads.append(sequence)

    def leads(self, sequence: Sequence) -> bool:
        """True if ``sequence`` yields to one of them."""
        return any(map(sequence.yields_to, self._heads))


class PriorityShare:
    """Lets later sequences have up to ``max_tokens`` of each step of a worker: here all of it, for
    any ``share`` of its time."""

    def __init__(self, share: float, max_num_batched_tokens: int) -> None:
        self.max_tokens = max_num_batched_tokens

    @property
    def expects_first(self) -> bool:
        """True if first sequences ran so recently that another may arrive."""
        return False

    def join(self, plan: StepPlan, spare: float) -> bool:
        """Returns True if later sequences join ``plan``, which has the rows of the first ones. They
        never join a plan of several steps. ``spare``: the part of the time that these leave."""
        return plan.num_steps == 1

    def has_joined(self, plan: StepPlan) -> bool:
        """True if later sequences are in ``plan``, which is in flight."""
        return False

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from ``result``, the result of ``plan``."""

    def may_join(self, num_decode: int, has_prefill: bool = False) -> bool:
        """Returns True if later sequences may join a plan with ``num_decode`` first sequences that
        decode, and with prompts of first ones if ``has_prefill``."""
        return True
