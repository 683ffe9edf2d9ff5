"""Detects workers with overdue results. Pure."""

from services.scheduler.worker_state import WorkerState

LOOK_S = 1.0


class Watchdog:
    """Counts its own looks, one every ``LOOK_S``, instead of the time: while the scheduler itself
    stood still, unread results may have arrived."""

    def __init__(self, workers: dict[str, WorkerState]) -> None:
        self._workers = workers
        self._found: dict[str, tuple[int, int]] = {}  # oldest step, looks at it

    def look(self) -> list[str]:
        """Returns the workers that owe the result of their oldest plan for twice their
        ``stall_s``."""
        oldest = {
            worker_id: worker.in_flight[0].step
            for worker_id, worker in self._workers.items()
            if worker.in_flight
        }
        self._found = {key: self._count(key, step) for key, step in oldest.items()}
        return [
            key
            for key, (_, num_looks) in self._found.items()
            if num_looks * LOOK_S >= 2 * self._workers[key].capacity.stall_s
        ]

    def _count(self, worker_id: str, step: int) -> tuple[int, int]:
        before, num_looks = self._found.get(worker_id, (0, 0))
        return step, num_looks + 1 if step == before else 0
