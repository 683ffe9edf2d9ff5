"""Which worker a waiting sequence goes to. Pure."""

from collections.abc import Iterable
from math import ceil

from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

MAX_LAG_STEPS = 4


def is_its_turn(
    worker: WorkerState,
    workers: Iterable[WorkerState],
    sequence: Sequence,
    num_waiting: int,
    num_absorbed: int,
) -> bool:
    """Whether ``worker`` has fewer sequences than its share once all that wait have been placed.

    The share is that of the workers which could take ``sequence`` soon. One whose plan has been in
    flight while each of the others finished ``MAX_LAG_STEPS`` of theirs is not waited for: it may
    hang, or be busy with a long prompt. ``num_absorbed`` counts the results of all workers.
    """
    others = [each for each in workers if each is not worker and each.admits]
    max_lag = MAX_LAG_STEPS * len(others)
    num_running = len(worker.running)
    num_candidates = 1
    for other in others:
        is_late = other.in_flight is not None and num_absorbed - other.in_flight_since > max_lag
        if not is_late and other.has_room_for(sequence):
            num_running += len(other.running)
            num_candidates += 1
    return len(worker.running) < ceil((num_running + num_waiting) / num_candidates)
