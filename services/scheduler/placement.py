"""Chooses the worker that a waiting sequence goes to. Pure."""

from collections.abc import Callable, Iterable
from math import ceil

from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

MAX_LAG_STEPS = 4
SEQUENCE_TOKENS = 64
"""How many tokens of prompt a running sequence counts for, since it slows down every step of those
beside it: with a prefix of 1000 cached tokens a worker is chosen until it runs some 15 sequences
more than the others. Chosen, not measured."""


def may_run_on(worker: WorkerState, workers: Iterable[WorkerState], sequence: Sequence) -> bool:
    """Whether ``sequence`` fits ``worker``, and may be risked on it.

    A worker that has not finished its first steps may be broken. While another one that has could
    run the sequence, it gets one at a time, and none that has lost a worker before: one bad worker
    must not make a sequence look like the reason of two deaths.
    """
    if not worker.fits(sequence):
        return False
    if worker.is_proven or not any(
        each.is_proven and each.admits and each.fits(sequence) for each in workers
    ):
        return True
    is_free = not any(each.has_credit for each in worker.running.values())
    return is_free and not sequence.num_worker_deaths


def is_best_worker(
    worker: WorkerState,
    workers: Iterable[WorkerState],
    sequence: Sequence,
    num_waiting: int,
    num_absorbed: int,
    can_start: Callable[[WorkerState], bool],
) -> bool:
    """Whether ``worker`` is the best one for ``sequence`` of the workers that ``can_start`` it.

    Where all have equally much of the prompt cached, it is if it runs fewer sequences than its
    share of all that run and wait. Otherwise, if no other would be done with the prompt sooner:
    none has a higher number of cached tokens less load.

    A worker whose plan has been in flight while each of the others finished ``MAX_LAG_STEPS`` of
    theirs is left out: it may hang, or be busy with a long prompt. ``num_absorbed`` counts the
    results of all workers.
    """
    others = [each for each in workers if each is not worker and each.admits]
    max_lag = MAX_LAG_STEPS * len(others)
    candidates = [worker]
    for other in others:
        is_late = bool(other.in_flight) and num_absorbed - other.in_flight_since > max_lag
        if not is_late and can_start(other):
            candidates.append(other)
    if len(candidates) == 1:
        return True
    cached = [each.num_cached(sequence) for each in candidates]
    if len(set(cached)) == 1:
        num_running = sum(len(each.running) for each in candidates)
        return len(worker.running) < ceil((num_running + num_waiting) / len(candidates))
    scores = [num - _load(each) for num, each in zip(cached, candidates, strict=True)]
    return scores[0] == max(scores)


def _load(worker: WorkerState) -> int:
    """Returns what ``worker`` has to compute before or beside a newcomer, in tokens."""
    num_pending = sum(each.num_to_compute for each in worker.running.values())
    return num_pending + SEQUENCE_TOKENS * len(worker.running)
