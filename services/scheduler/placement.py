"""Chooses the worker that a waiting sequence goes to. Pure."""

from collections.abc import Mapping
from math import ceil

from services.scheduler.prefills import PrefillLimits
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

MAX_LAG_STEPS = 4
MIN_COMPARED = 32
"""A worker is compared with so many others, or up to twice as many: a sequence must not cost more
where there are more workers, and the best of so many, others each time, is nearly the best of all.
"""
MAX_CHANCE = 0.25  # of a sequence: how far the mean of those may be off
SEQUENCE_TOKENS = 64
"""How many tokens of prompt a running sequence counts for, since it slows down every step of those
beside it: with a prefix of 1000 cached tokens a worker is chosen until it runs some 15 sequences
more than the others. Chosen, not measured."""


class Placement:
    """Chooses among ``workers`` for a waiting sequence. ``holders`` names one for each block of the
    prefix cache."""

    def __init__(
        self,
        workers: Mapping[str, WorkerState],
        holders: Mapping[bytes, str],
        prefill_limits: PrefillLimits,
    ) -> None:
        self._workers = workers
        self._holders = holders
        self._prefill_limits = prefill_limits
        self._proven: dict[str, WorkerState] = {}

    def note_proven(self, worker: WorkerState) -> None:
        """``worker`` has finished its first steps."""
        self._proven[worker.worker_id] = worker

    def forget(self, worker_id: str) -> None:
        """The worker is lost."""
        self._proven.pop(worker_id, None)

    def may_run_on(self, worker: WorkerState, sequence: Sequence) -> bool:
        """Whether ``sequence`` fits ``worker``, and may be risked on it.

        A worker that has not finished its first steps may be broken. While another one that has
        could run the sequence, it gets one at a time, and none that has lost a worker before: one
        bad worker must not make a sequence look like the reason of two deaths.
        """
        if not worker.fits(sequence):
            return False
        if worker.is_proven:
            return True
        if not any(each.admits and each.fits(sequence) for each in self._proven.values()):
            return True
        return _is_free(worker) and not sequence.num_worker_deaths

    def is_held_back(self, worker: WorkerState) -> bool:
        """Whether ``may_run_on`` is false of every sequence, known without a look at any: another
        worker, just as large, has finished its first steps."""
        return (
            not worker.is_proven
            and not _is_free(worker)
            and any(
                each.admits and each.capacity == worker.capacity for each in self._proven.values()
            )
        )

    def has_other(self, worker: WorkerState, sequence: Sequence, num_absorbed: int) -> bool:
        """Whether another one than ``worker`` can start ``sequence`` soon. ``num_absorbed`` counts
        the results of all workers."""
        others = self._others(worker, sequence, num_absorbed)
        return bool(self._candidates(others, sequence, num_absorbed))

    def is_best(
        self, worker: WorkerState, sequence: Sequence, num_waiting: int, num_absorbed: int
    ) -> bool:
        """Whether ``worker`` is the best one for ``sequence``, of itself and those that can start
        it.

        Where all have equally much of the prompt cached, it is if it runs fewer sequences than its
        share of all that run and wait, with those that are compared standing for all. Otherwise, if
        no other would be done with the prompt sooner: none has a higher number of cached tokens
        less load.
        """
        others = self._others(worker, sequence, num_absorbed)
        rivals = self._candidates(others, sequence, num_absorbed)
        if not rivals:
            return True
        num_cached = worker.num_cached(sequence)
        cached = [each.num_cached(sequence) for each in rivals]
        if set(cached) == {num_cached}:
            share = _share([worker, *rivals], num_waiting, self._scale(others))
            return len(worker.running) < share
        score = num_cached - _load(worker)
        return not any(_is_above(score, *each) for each in zip(rivals, cached, strict=True))

    def _others(
        self, worker: WorkerState, sequence: Sequence, num_absorbed: int
    ) -> list[WorkerState]:
        """Returns the workers beside ``worker`` that ``sequence`` may go to: all, or where these
        are many, each of the same distance from the one before, others each time, and the one that
        has the most of its prefix cached."""
        others = [each for each in self._workers.values() if each is not worker]
        distance = len(others) // MIN_COMPARED
        if distance < 2:
            return others
        compared = others[num_absorbed % distance :: distance]
        holder = self._workers.get(self._holder_of(sequence, worker.capacity.block_size))
        if holder is not None and holder is not worker and holder not in compared:
            compared.append(holder)
        return compared

    def _holder_of(self, sequence: Sequence, block_size: int) -> str:
        """Returns the name of one that has as much of the prefix cached as any, or an empty one."""
        found = ""
        for number in range(sequence.max_cached // block_size):
            holder = self._holders.get(sequence.block_hash(number, block_size))
            if holder is None:
                break
            found = holder
        return found

    def _candidates(
        self, others: list[WorkerState], sequence: Sequence, num_absorbed: int
    ) -> list[WorkerState]:
        """Returns those of ``others`` that can start ``sequence`` soon.

        A worker whose plan has been in flight while each of the others finished ``MAX_LAG_STEPS``
        of theirs is left out: it may hang, or be busy with a long prompt.
        """
        admitting = [each for each in others if each.admits]
        max_lag = MAX_LAG_STEPS * len(admitting) * self._scale(others)
        return [
            each
            for each in admitting
            if not (each.in_flight and num_absorbed - each.in_flight_since > max_lag)
            and each.has_room_for(sequence)
            and self._prefill_limits.has_room_for(sequence, each)
            and self.may_run_on(each, sequence)
        ]

    def _scale(self, others: list[WorkerState]) -> float:
        """How many workers each of ``others`` stands for."""
        return (len(self._workers) - 1) / len(others) if others else 1.0


def _is_free(worker: WorkerState) -> bool:
    return not any(each.has_credit for each in worker.running.values())


def _share(candidates: list[WorkerState], num_waiting: int, scale: float) -> int:
    """How many sequences the first one may run: the mean, where each other stands for ``scale``
    workers. It is not rounded up where that may be chance, but those that run the fewest may run
    one more."""
    own, *others = [len(each.running) for each in candidates]
    mean = (own + scale * sum(others) + num_waiting) / (1 + scale * len(others))
    chance = MAX_CHANCE if scale > 1 else 0.0
    return max(1 + min(own, *others), ceil(mean - chance))


def _is_above(score: int, worker: WorkerState, num_cached: int) -> bool:
    """Whether ``worker`` has a higher one; what all its sequences lack is counted only where that
    decides."""
    most = num_cached - SEQUENCE_TOKENS * len(worker.running)
    return most > score and num_cached - _load(worker) > score


def _load(worker: WorkerState) -> int:
    """Returns what ``worker`` has to compute before or beside a newcomer, in tokens."""
    num_pending = sum(each.num_to_compute for each in worker.running.values())
    return num_pending + SEQUENCE_TOKENS * len(worker.running)
