"""Selects running sequences to preempt for a waiting one of an earlier priority. Pure."""

from services.scheduler.placement import Placement
from services.scheduler.prefills import PrefillLimits
from services.scheduler.queues import WaitingQueue
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState


class Preemption:
    """Compares running sequences with the first ones in ``waiting``."""

    def __init__(
        self, waiting: WaitingQueue, placement: Placement, prefill_limits: PrefillLimits
    ) -> None:
        self._waiting = waiting
        self._placement = placement
        self._prefill_limits = prefill_limits

    def inferior(self, worker: WorkerState, num_absorbed: int) -> Sequence | None:
        """Returns the youngest running sequence to preempt for a waiting one, or None. The waiting
        sequence is of an earlier priority, is ahead of it, has no room on any worker, and would fit
        if all running sequences that yield to it were gone. ``num_absorbed`` counts the results of
        all workers."""
        first = self._superior(worker)
        if first is None or worker.has_room_for(first):
            return None
        inferiors = [
            each
            for each in worker.running.values()
            if each.yields_to(first) and not each.is_isolated
        ]
        if not inferiors or not worker.has_room_without(inferiors, first):
            return None
        if self._placement.has_other(worker, first, num_absorbed):
            return None
        return max(inferiors, key=lambda each: each.order)

    def _superior(self, worker: WorkerState) -> Sequence | None:
        """Returns the first waiting sequence that is ahead of a running one and would start on
        ``worker`` if it had room."""
        youngest = max((each.order for each in worker.running.values()), default=None)
        first = self._waiting.first_where(lambda _: True)
        if youngest is None or first is None or first.order > youngest or not worker.admits:
            return None
        unfinished = {
            each.prompt_key for each in worker.running.values() if each.num_to_compute > 1
        }
        return self._waiting.first_where(
            lambda each: (
                each.order < youngest
                and each.prompt_key not in unfinished
                and self._placement.may_run_on(worker, each)
                and self._prefill_limits.has_room_for(each, worker)
            )
        )
