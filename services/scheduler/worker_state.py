"""One worker as the scheduler sees it: its blocks, its slots, the plan it is running."""

from math import ceil

from services.scheduler.block_pool import BlockPool
from services.scheduler.limits import fits
from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.prefix_index import PrefixIndex
from services.scheduler.sequence import Sequence
from shared.messages import Capacity, StepPlan


class WorkerState:
    """Blocks and slots of one worker. A slot given back is released in its next plan.

    ``admits``: it takes new sequences; ``is_leaving``: it wants to be rid of those it has;
    ``was_alone``: its last plan computed one suspect and nothing else. Unless ``caches_prefixes``
    its index stays empty.
    """

    def __init__(self, worker_id: str, capacity: Capacity, caches_prefixes: bool) -> None:
        self.worker_id = worker_id
        self.capacity = capacity
        self.index = PrefixIndex()
        self.pool = BlockPool(capacity.num_blocks, self.index)
        self.running: dict[int, Sequence] = {}
        self.in_flight: StepPlan | None = None
        self.in_flight_since = 0
        self.admits = True
        self.is_leaving = False
        self.was_alone = False
        self._caches_prefixes = caches_prefixes
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
        return self.num_free_slots > 0 and self._has_blocks_for(sequence) and self.fits(sequence)

    def num_blocks_lacking(self, sequence: Sequence) -> int:
        """Blocks to add so that the KV of all known ids has a place."""
        return max(0, ceil(sequence.num_known / self.capacity.block_size) - len(sequence.blocks))

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks that hold its first ids. Never all: the last one's logits are wanted."""
        blocks: list[int] = []
        if not self.index:
            return blocks
        size = self.capacity.block_size
        names = sequence.hashes(size)
        for number in range((sequence.num_known - 1) // size):
            block = self.index.find(names[number])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_cached(self, sequence: Sequence) -> int:
        """Ids whose KV it would find here."""
        return len(self.cached_blocks(sequence)) * self.capacity.block_size

    def index_blocks(self, sequence: Sequence) -> None:
        """Others may use its full blocks whose ids are known and computed, or are once the plan
        that is sent now has run: a worker runs plans in order."""
        num_new = self.num_to_index(sequence)
        if num_new > 0:
            start, sequence.num_indexed = sequence.num_indexed, sequence.num_indexed + num_new
            names = sequence.hashes(self.capacity.block_size)
            for number in range(start, sequence.num_indexed):
                self.index.add(names[number], sequence.blocks[number])

    def num_to_index(self, sequence: Sequence) -> int:
        """Full blocks that ``index_blocks`` would add."""
        if not self._caches_prefixes:
            return 0
        num_tokens = min(sequence.num_computed, sequence.num_known)
        return num_tokens // self.capacity.block_size - sequence.num_indexed

    def filling(self, plan: StepPlan) -> list[Sequence]:
        """Those of which ``plan`` computes a chunk that fills a block."""
        chunks = [self.running[row.slot] for row in plan.prefill]
        return [each for each in chunks if self.num_to_index(each) > 0]

    def try_extend(self, sequence: Sequence) -> list[int] | None:
        """The blocks that a running sequence lacked, or None where there are too few."""
        blocks = self.pool.try_take(self.num_blocks_lacking(sequence))
        if blocks is not None:
            sequence.blocks.extend(blocks)
        return blocks

    def place(self, sequence: Sequence) -> None:
        """Gives a slot and blocks, cached ones first, to a sequence that there is room for."""
        sequence.blocks = self.cached_blocks(sequence)
        self.pool.share(sequence.blocks)
        sequence.num_indexed = len(sequence.blocks)
        sequence.num_computed = sequence.num_indexed * self.capacity.block_size
        extended = self.try_extend(sequence)
        assert extended is not None
        sequence.worker, sequence.slot = self, self._free_slots.pop()
        sequence.last_worker_id = self.worker_id
        self.running[sequence.slot] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Frees slot and blocks. Only while no plan that names them is in flight."""
        del self.running[sequence.slot]
        self._released.append(sequence.slot)
        self.pool.give_back(sequence.blocks)
        sequence.leave_worker()

    def _has_blocks_for(self, sequence: Sequence) -> bool:
        """Cached blocks that somebody owns cost nothing."""
        num_lacking = self.num_blocks_lacking(sequence)
        if num_lacking <= self.pool.num_free:
            return True
        cached = self.cached_blocks(sequence)
        num_shared = sum(self.pool.num_owners(block) > 0 for block in cached)
        return num_lacking - num_shared <= self.pool.num_free


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
