"""Keeps prompts to compute from decode workers, and all else from prefill workers. Pure.

A role is a wish: a sequence is kept from a worker only while one of the other role has room for it.
"""

from collections.abc import Iterable

from services.scheduler.moves.transfers import Transfers
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence

LONG_TOKENS = 512  # of a prompt for prefill workers. Chosen
MAX_LAG_STEPS = 64
"""Results of each worker during one plan of another, which then may hang."""


class Roles:
    """The roles of ``workers``."""

    def __init__(self, core: Scheduler, workers: Iterable[Transfers]) -> None:
        self._core = core
        self._workers = workers
        self._prefill: list[Transfers] = []
        self._others: list[Transfers] = []
        self._are_equal = True

    def note_workers(self) -> None:
        """Must be called after each change of the workers."""
        self._prefill = [each for each in self._workers if each.message.role == "prefill"]
        self._others = [each for each in self._workers if each.message.role != "prefill"]
        self._are_equal = not (self._prefill and self._others)

    def is_kept(self, worker: Transfers, sequence: Sequence) -> bool:
        """True if ``worker`` leaves ``sequence`` to workers of another role. Never true for all
        workers that could take it."""
        role = worker.message.role
        if self._are_equal or role == "both":
            return False
        others = self._prefill if role == "decode" else self._others
        free = [each for each in others if each.worker.admits and each.worker.num_free_slots]
        if not free or self._is_long(sequence) != (role == "decode"):
            return False
        return self._can_take(free, sequence)

    def _is_long(self, sequence: Sequence) -> bool:
        """True for a newcomer with a long prompt to compute, wherever it would decode."""
        num_cached = sequence.num_known - LONG_TOKENS + 1
        if sequence.has_run or num_cached <= 0:
            return False
        return not any(each.worker.has_cached(sequence, num_cached) for each in self._others)

    def _can_take(self, workers: list[Transfers], sequence: Sequence) -> bool:
        now = now_of(self._core)
        most = MAX_LAG_STEPS * len(self._core.workers)
        return any(
            not (each.worker.in_flight and now - each.worker.in_flight_since > most)
            and each.worker.has_room_for(sequence)
            and self._core.placement.may_run_on(each.worker, sequence)
            for each in workers
        )


def now_of(core: Scheduler) -> int:
    """The number of results of all workers, or fewer: as plans in flight have seen it."""
    return max((each.in_flight_since for each in core.workers.values()), default=0)
