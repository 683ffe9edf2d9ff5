"""Chooses a worker for a waiting sequence. Pure."""

from collections.abc import Callable, Mapping
from math import ceil

from services.scheduler.prefills import PrefillLimits
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

MAX_LAG_STEPS = 4
MIN_COMPARED = 32
"""A worker is compared with at least this number of others, and with fewer than twice this number.
The cost per sequence is then independent of the number of workers, and the best of a changing
sample is nearly the best of all."""
MAX_CHANCE = 0.25  # of a sequence: assumed error of the sample's mean
SEQUENCE_TOKENS = 64
"""The load of a running sequence in tokens of prompt, since it slows down every step of its worker:
a worker with 1000 cached tokens of a prompt is chosen until it runs some 15 sequences more than the
others. Chosen, not measured."""
ALIKE = 1.5
"""Workers count as equally fast if their times differ by at most this factor, since measured times
vary. Chosen, not measured."""


class Placement:
    """Chooses among ``workers``. ``holders`` names one worker for each block hash in a prefix
    cache."""

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
        """``worker`` has finished its probation."""
        self._proven[worker.worker_id] = worker

    def forget(self, worker_id: str) -> None:
        self._proven.pop(worker_id, None)

    def may_run_on(self, worker: WorkerState, sequence: Sequence) -> bool:
        """True if ``sequence`` fits ``worker`` and its probation allows it.

        A worker in its first steps may be broken. While a proven worker could run the sequence, a
        new one runs one sequence at a time, and none that has lost a worker: a broken worker must
        not make a sequence look guilty of two deaths.
        """
        if not worker.fits(sequence):
            return False
        if worker.is_proven:
            return True
        if not any(each.admits and each.fits(sequence) for each in self._proven.values()):
            return True
        return _is_free(worker) and not sequence.num_worker_deaths

    def is_held_back(self, worker: WorkerState) -> bool:
        """True if ``worker`` is busy in its probation, and a proven worker has the same capacity:
        ``may_run_on`` is then false for every sequence, but for lack of a resource there."""
        return (
            not worker.is_proven
            and not _is_free(worker)
            and any(
                each.admits and each.capacity == worker.capacity for each in self._proven.values()
            )
        )

    def has_room(self, worker: WorkerState, sequence: Sequence) -> bool:
        """True if ``worker`` could admit ``sequence`` now."""
        return (
            worker.admits
            and worker.has_room_for(sequence)
            and worker.lacking(sequence) is None
            and self.may_run_on(worker, sequence)
        )

    def has_other(self, worker: WorkerState, sequence: Sequence, num_absorbed: int) -> bool:
        """True if a worker other than ``worker`` can start ``sequence`` soon. ``num_absorbed``
        counts the results of all workers."""
        others = self._others(worker, sequence, num_absorbed)
        return bool(self._candidates(others, sequence, num_absorbed))

    def is_best(
        self, worker: WorkerState, sequence: Sequence, num_waiting: int, num_absorbed: int
    ) -> bool:
        """True if ``worker`` is the best choice for ``sequence`` among the workers that can start
        it.

        If all have equally many tokens of the prompt cached, it must run fewer sequences than its
        share of all running and waiting ones, by the speed at which workers decode; the compared
        workers stand for all. Otherwise no other worker may be done with the prompt earlier.
        """
        others = self._others(worker, sequence, num_absorbed)
        rivals = self._candidates(others, sequence, num_absorbed)
        if not rivals:
            return True
        candidates = [worker, *rivals]
        num = sequence.num_to_compute
        uncached = [num - each.num_cached(sequence) for each in candidates]
        if len({*uncached}) == 1:
            share = _share(candidates, num_waiting, self._scale(others))
            return len(worker.running) < share
        own_time, *times = _relative(candidates, lambda each: each.stream_share.alone_s(num, num))
        most = own_time * (uncached[0] + _load(worker))
        return not any(
            _is_below(most, *each) for each in zip(rivals, uncached[1:], times, strict=True)
        )

    def _others(
        self, worker: WorkerState, sequence: Sequence, num_absorbed: int
    ) -> list[WorkerState]:
        """Returns the other workers to compare: all, or a sample at equal distances that changes
        with ``num_absorbed``, plus the worker with the longest cached prefix."""
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
        """Returns the id of a worker with the longest cached prefix, or an empty string."""
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
        """Returns the workers of ``others`` that can start ``sequence`` soon.

        A worker is left out if the others have finished ``MAX_LAG_STEPS`` plans each while one of
        its plans was in flight: it may hang, or compute a long prompt.
        """
        admitting = [each for each in others if each.admits]
        max_lag = MAX_LAG_STEPS * len(admitting) * self._scale(others)
        return [
            each
            for each in admitting
            if not (each.in_flight and num_absorbed - each.in_flight_since > max_lag)
            and self.has_room(each, sequence)
            and self._prefill_limits.has_room_for(sequence, each)
        ]

    def _scale(self, others: list[WorkerState]) -> float:
        """The number of workers each of ``others`` stands for."""
        return (len(self._workers) - 1) / len(others) if others else 1.0


def _is_free(worker: WorkerState) -> bool:
    return not any(each.has_credit for each in worker.running.values())


def _share(candidates: list[WorkerState], num_waiting: int, scale: float) -> int:
    """Returns the most sequences the first candidate may run: a part of all by its speed, with
    ``scale`` workers for each other candidate. A sample's mean is rounded down within its error,
    but the worker that would be the least busy with one more may always run it."""
    rows = max(len(each.running) for each in candidates)
    own_time, *times = _relative(candidates, lambda each: each.stream_share.decode_s(rows))
    own, *others = [len(each.running) for each in candidates]
    num_all = own + scale * sum(others) + num_waiting
    mean = num_all / (1 + own_time * scale * sum(1 / time for time in times))
    chance = MAX_CHANCE if scale > 1 else 0.0
    least = min(time * (num + 1) for time, num in zip(times, others, strict=True))
    return max(int(least / own_time), ceil(mean - chance - (1 - 1 / own_time)))


def _relative(workers: list[WorkerState], time_s: Callable[[WorkerState], float]) -> list[float]:
    """Returns the times of workers as multiples of the shortest one; all are 1 if one is unknown or
    the workers are alike."""
    times = [time_s(each) for each in workers]
    shortest, longest = min(times), max(times)
    if longest <= ALIKE * shortest or not shortest:
        return [1.0] * len(times)
    return [time / shortest for time in times]


def _is_below(most: float, worker: WorkerState, num_uncached: int, time: float) -> bool:
    """True if ``worker`` has less to do, in ``time`` per token. Tokens to compute are summed only
    if they decide."""
    least = num_uncached + SEQUENCE_TOKENS * len(worker.running)
    return time * least < most and time * (num_uncached + _load(worker)) < most


def _load(worker: WorkerState) -> int:
    """Returns the load of ``worker`` in tokens: pending ones, and ``SEQUENCE_TOKENS`` per
    sequence."""
    num_pending = sum(each.num_to_compute for each in worker.running.values())
    return num_pending + SEQUENCE_TOKENS * len(worker.running)
