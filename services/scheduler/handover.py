"""Hands the sequences of workers that leave over to other workers. Pure."""

from collections.abc import Mapping

from services.scheduler.queues import Queues
from services.scheduler.sequence import Obstacle, Sequence
from services.scheduler.worker_state import WorkerState


class Handover:
    """Moves sequences from workers that leave into the queues, each as soon as it may go.

    One goes after the other, for its stream stands still until another worker has computed it as
    far as it was; all go at once where there is no time for that (``releases_all``).
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
        """``worker`` leaves; a second call says that it has no time left."""
        worker.releases_all = worker.is_leaving
        worker.is_leaving, worker.admits = True, False
        self._leaving[worker.worker_id] = worker
        self.run()

    def end(self, worker_id: str) -> None:
        """The worker has left. Ignored for one that handed nothing over."""
        self._leaving.pop(worker_id, None)

    def run(self) -> None:
        for worker in self._leaving.values():
            while worker.may_hand_over and (
                worker.releases_all or not self._stands_still(worker.handed_over)
            ):
                sequence = worker.handed_over = worker.oldest
                worker.remove(sequence)
                self._queues.put_back(sequence, Obstacle.HANDED_OVER)

    def _stands_still(self, sequence: Sequence | None) -> bool:
        """Whether a sequence that was handed over is still to be computed as far as it was, and
        there is a worker that can."""
        return (
            sequence is not None
            and self._sequences.get(sequence.key) is sequence
            and sequence.has_credit
            and sequence.num_to_compute > 1
            and any(each.admits and each.fits(sequence) for each in self._workers.values())
        )
