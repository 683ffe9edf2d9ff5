"""Moves the sequences of a leaving worker to other workers. Pure."""

from collections.abc import Mapping

from services.scheduler.queues import Queues
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import WorkerState


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
