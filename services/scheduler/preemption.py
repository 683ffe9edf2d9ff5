"""Running sequences that lose their slot: to a waiting one of an earlier priority, or because their
worker leaves. Pure."""

from collections.abc import Mapping

from services.scheduler.placement import Placement
from services.scheduler.prefills import PrefillLimits
from services.scheduler.queues import Queues
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import WorkerState


class Preemption:
    """Takes slots from running sequences, which return to ``queues``; ``num`` counts them."""

    def __init__(self, queues: Queues, placement: Placement, prefill_limits: PrefillLimits) -> None:
        self.num = 0
        self._queues = queues
        self._waiting = queues.waiting
        self._placement = placement
        self._prefill_limits = prefill_limits

    def make_room(self, worker: WorkerState, first: Sequence, num_absorbed: int) -> None:
        """Preempts sequences without credit, then sequences of a later priority, until ``first``,
        the first waiting sequence, has room. Ones that starve for a resource get the room of the
        former. None loses its KV for a sequence that lacks more than that."""
        starved = (each.starved for each in worker.resources)
        for each in (first, *filter(None, starved)):
            if not worker.paused:
                break
            later = (other for other in worker.running.values() if other.yields_to(each))
            if worker.has_room_without({*worker.paused, *later}, each):
                while worker.paused and not worker.has_room_for(each):
                    self.preempt(worker)
        if worker.in_flight:
            return
        while inferior := self.inferior(worker, num_absorbed):
            self._take_slot(worker, inferior, WaitReason.PRIORITY)

    def preempt(
        self,
        worker: WorkerState,
        why: WaitReason = WaitReason.KV_BLOCKS,
        spared: Sequence | None = None,
    ) -> None:
        """Takes slot and blocks from a sequence without credit, else from the youngest with the
        reason ``why``."""
        others = [each for each in worker.running.values() if each is not spared]
        sequence = max(others, key=lambda each: (not each.has_credit, each.order))
        self._take_slot(worker, sequence, why)

    def _take_slot(self, worker: WorkerState, sequence: Sequence, why: WaitReason) -> None:
        worker.remove(sequence)
        self._queues.put_back(sequence, why if sequence.has_credit else WaitReason.CREDIT)
        sequence.num_preemptions += 1
        self.num += 1

    def inferior(self, worker: WorkerState, num_absorbed: int) -> Sequence | None:
        """Returns the youngest running sequence to preempt for a waiting one, or None. The waiting
        sequence is of an earlier priority, is ahead of it, has no room on any worker, and would fit
        if all running sequences that yield to it were gone. ``num_absorbed`` counts the results of
        all workers."""
        first = self._superior(worker)
        if first is None or worker.has_room_for(first):
            return None
        running = worker.running.values()
        inferiors = [each for each in running if each.yields_to(first) and not each.is_isolated]
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
                and not any(other.is_kept_from(each) for other in worker.resources)
            )
        )


class Handover:
    """Returns sequences of leaving workers to the queues.

    They go one at a time: the stream of a sequence pauses until another worker has recomputed it.
    All go at once if the worker has no time for that (``releases_all``).
    """

    def __init__(
        self,
        workers: Mapping[str, WorkerState],
        sequences: Mapping[tuple[str, int], Sequence],
        queues: Queues,
    ) -> None:
        self._workers = workers
        self._sequences = sequences
        self._queues = queues
        self._leaving: dict[str, WorkerState] = {}

    @property
    def is_under_way(self) -> bool:
        return bool(self._leaving)

    def begin(self, worker: WorkerState) -> None:
        """Marks ``worker`` as leaving; a second call releases all its sequences at once."""
        worker.releases_all = worker.is_leaving
        worker.is_leaving, worker.admits = True, False
        self._leaving[worker.worker_id] = worker
        self.run()

    def end(self, worker_id: str) -> None:
        """Does nothing for a worker that handed nothing over."""
        self._leaving.pop(worker_id, None)

    def run(self) -> None:
        for worker in self._leaving.values():
            while worker.may_hand_over and (
                worker.releases_all or not self._stands_still(worker.handed_over)
            ):
                sequence = worker.handed_over = worker.oldest
                worker.remove(sequence)
                self._queues.put_back(sequence, WaitReason.HANDED_OVER)

    def _stands_still(self, sequence: Sequence | None) -> bool:
        """True while the last sequence handed over still has to be recomputed and a worker can do
        so."""
        return (
            sequence is not None
            and self._sequences.get(sequence.key) is sequence
            and sequence.has_credit
            and sequence.num_to_compute > 1
            and any(each.admits and each.fits(sequence) for each in self._workers.values())
        )
