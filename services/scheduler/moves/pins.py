"""Cached blocks that a worker does not evict while they are on their way to others. Pure.

They have an owner more, until a sequence of the worker needs their room: then they are cached
blocks as before, and what is evicted of them is computed again.
"""

from functools import partial

from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState


class Pins:
    """Blocks of ``worker``, by what is on its way."""

    def __init__(self, worker: WorkerState) -> None:
        self._worker, self._pool = worker, worker.pool
        self._blocks: dict[object, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._blocks.values()))

    def add(self, parcel: object, blocks: list[int]) -> None:
        self._pool.share(blocks)
        self._blocks[parcel] = blocks
        self.yield_to_running()

    def drop(self, parcel: object) -> None:
        """Does nothing for one without pins."""
        self._pool.free(self._blocks.pop(parcel, []))

    def yield_to(self, sequence: Sequence) -> None:
        """A waiting sequence needs room."""
        if not self._blocks:
            return
        worker = self._worker
        num_places = sequence.num_expected + 2 * worker.capacity.num_speculative_tokens
        has_room = partial(
            worker.blocks.has_room_for, sequence, num_places, worker.end_of(sequence)
        )
        if not has_room() and has_room(num_freed=len(self)):
            self.clear()

    def yield_to_running(self) -> None:
        """Between plans."""
        running = self._worker.running.values()
        if self._blocks and (
            self._worker.is_short_of_blocks or any(each.is_isolated for each in running)
        ):
            self.clear()

    def clear(self) -> None:
        for parcel in [*self._blocks]:
            self.drop(parcel)
