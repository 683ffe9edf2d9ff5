"""One worker as the scheduler sees it: its blocks, its slots, the plan it is running."""

from math import ceil

from services.scheduler.block_pool import BlockPool
from services.scheduler.limits import fits
from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.sequence import Sequence
from shared.messages import Capacity, StepPlan


class WorkerState:
    """Blocks and slots of one worker. A slot given back is released in its next plan.

    ``admits``: it takes new sequences; ``is_leaving``: it wants to be rid of those it has;
    ``was_alone``: its last plan computed one suspect and nothing else.
    """

    def __init__(self, worker_id: str, capacity: Capacity) -> None:
        self.worker_id = worker_id
        self.capacity = capacity
        self.pool = BlockPool(capacity.num_blocks)
        self.running: dict[int, Sequence] = {}
        self.in_flight: StepPlan | None = None
        self.in_flight_since = 0
        self.admits = True
        self.is_leaving = False
        self.was_alone = False
        self._free_slots = list(range(capacity.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._num_steps = 0

    @property
    def num_free_slots(self) -> int:
        return self.capacity.max_num_seqs - len(self.running)

    @property
    def has_stalled(self) -> bool:
        return any(not sequence.has_credit for sequence in self.running.values())

    def begin_plan(self) -> PlanBuilder:
        self._free_slots.extend(self._released)
        release, self._released = self._released, []
        self._num_steps += 1
        return PlanBuilder(self._num_steps, self.capacity.max_num_batched_tokens, release)

    def computed_slots(self) -> set[int]:
        """The slots that the plan in flight computes."""
        if self.in_flight is None:
            return set()
        chunks = {row.slot for row in self.in_flight.prefill}
        return chunks | {row.slot for row in self.in_flight.decode}

    def runnable(self) -> list[Sequence]:
        """Those that may be computed together, oldest first."""
        sequences = self.running.values()
        return sorted(
            (each for each in sequences if each.has_credit and not each.is_suspect), key=_order
        )

    def fits(self, sequence: Sequence) -> bool:
        """Whether it could run here to its end, alone."""
        return fits(self.capacity, len(sequence.prompt), sequence.params.max_tokens)

    def has_room_for(self, sequence: Sequence) -> bool:
        """Whether it could enter now."""
        return (
            self.num_free_slots > 0
            and self.num_blocks_lacking(sequence) <= self.pool.num_free
            and self.fits(sequence)
        )

    def num_blocks_lacking(self, sequence: Sequence) -> int:
        """Blocks to add so that the KV of all known ids has a place."""
        return max(0, ceil(sequence.num_known / self.capacity.block_size) - len(sequence.blocks))

    def try_extend(self, sequence: Sequence) -> list[int] | None:
        """The blocks that a running sequence lacked, or None where there are too few."""
        blocks = self.pool.try_take(self.num_blocks_lacking(sequence))
        if blocks is not None:
            sequence.blocks.extend(blocks)
        return blocks

    def place(self, sequence: Sequence) -> None:
        """Gives a slot and blocks to a sequence that there is room for."""
        blocks = self.pool.try_take(self.num_blocks_lacking(sequence))
        assert blocks is not None
        sequence.worker, sequence.slot, sequence.blocks = self, self._free_slots.pop(), blocks
        sequence.last_worker_id = self.worker_id
        self.running[sequence.slot] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Frees slot and blocks. Only while no plan that names them is in flight."""
        del self.running[sequence.slot]
        self._released.append(sequence.slot)
        self.pool.give_back(sequence.blocks)
        sequence.leave_worker()


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
