"""Cached blocks that a worker does not evict while they are on their way to others. Pure.

A pin is one more owner of a block. Once a sequence of the worker needs the room, its pins go: the
blocks are cached ones as before, and evicted ones are computed again.
"""

from collections import Counter
from functools import partial

from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState


class Pins:
    """Blocks of ``worker``, by the delivery that they are for."""

    def __init__(self, worker: WorkerState) -> None:
        self._worker, self._pool = worker, worker.pool
        self._blocks: dict[object, list[int]] = {}

    def add(self, delivery: object, blocks: list[int]) -> None:
        self._pool.share(blocks)
        self._blocks[delivery] = blocks
        self.yield_to_running()

    def drop(self, delivery: object) -> None:
        """Does nothing for one without pins."""
        self._pool.free(self._blocks.pop(delivery, []))

    def yield_to(self, sequence: Sequence) -> None:
        """The first waiting sequence needs room."""
        if not self._blocks:
            return
        worker = self._worker
        num_places = sequence.num_expected + 2 * worker.capacity.num_speculative_tokens
        has_room = partial(
            worker.blocks.has_room_for, sequence, num_places, worker.end_of(sequence)
        )
        if not has_room() and has_room(num_freed=self._num_freed(sequence)):
            self.clear()

    def _num_freed(self, sequence: Sequence) -> int:
        """Counts the blocks without other owners that ``sequence`` does not begin with."""
        cached = {block for each in self._worker.blocks.find_hit(sequence).tables for block in each}
        owned = Counter(block for each in self._blocks.values() for block in each)
        return sum(
            self._pool.ref_count(block) == num and block not in cached
            for block, num in owned.items()
        )

    def yield_to_running(self) -> None:
        """Between plans."""
        running = self._worker.running.values()
        if self._blocks and (
            self._worker.is_short_of_blocks or any(each.is_isolated for each in running)
        ):
            self.clear()

    def clear(self) -> None:
        for delivery in [*self._blocks]:
            self.drop(delivery)
