"""One worker as the scheduler sees it: its blocks, its slots, the plan it is running."""

from collections.abc import Iterator
from math import ceil

import numpy as np

from services.scheduler.block_pool import BlockPool
from services.scheduler.sequence import Sequence
from shared.messages import Admit, Capacity, Decode, Extend, Prefill, StepPlan


class PlanBuilder:
    """Collects the rows of one StepPlan and the token budget that is left."""

    def __init__(self, step: int, budget: int, release: list[int]) -> None:
        self.budget = budget
        self.plan = StepPlan(step, release, admit=[], extend=[], prefill=[], decode=[])
        self._known: list[np.ndarray] = []

    @property
    def is_empty(self) -> bool:
        plan = self.plan
        return not (plan.release or plan.prefill or plan.decode)

    @property
    def ids(self) -> np.ndarray:
        """Known ids of the admitted rows, concatenated: [sum of num_ids] int32."""
        return np.concatenate(self._known) if self._known else np.zeros(0, np.int32)

    def admit(self, sequence: Sequence, slot: int) -> None:
        ids = sequence.known_ids()
        self._known.append(ids)
        self.plan.admit.append(
            Admit(
                slot,
                sequence.request,
                sequence.attempt,
                sequence.route,
                sequence.choice,
                len(sequence.prompt),
                len(ids),
                sequence.num_computed,
                sequence.params,
                sequence.blocks,
            )
        )

    def extend(self, slot: int, blocks: list[int]) -> None:
        self.plan.extend.append(Extend(slot, blocks))

    def compute(self, slot: int, sequence: Sequence) -> None:
        """Gives the sequence as many tokens as it lacks and the budget allows."""
        num_tokens = min(sequence.num_to_compute, self.budget)
        if sequence.num_to_compute == 1:
            self.plan.decode.append(Decode(slot))
        else:
            self.plan.prefill.append(Prefill(slot, num_tokens))
        sequence.num_computed += num_tokens
        self.budget -= num_tokens


class WorkerState:
    """Blocks and slots of one worker. A slot given back is released in its next plan."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.pool = BlockPool(capacity.num_blocks)
        self.running: dict[int, Sequence] = {}
        self.in_flight: StepPlan | None = None
        self._free_slots = list(range(capacity.max_num_seqs - 1, -1, -1))
        self._released: list[int] = []
        self._num_steps = 0

    @property
    def num_free_slots(self) -> int:
        return self.capacity.max_num_seqs - len(self.running)

    @property
    def has_free_slot(self) -> bool:
        """Whether the plan that is being made can admit; a slot just freed is released by it."""
        return bool(self._free_slots)

    def begin_plan(self) -> PlanBuilder:
        self._free_slots.extend(self._released)
        release, self._released = self._released, []
        self._num_steps += 1
        return PlanBuilder(self._num_steps, self.capacity.max_num_batched_tokens, release)

    def slots_in_flight(self) -> set[int]:
        """The slots that the plan in flight computes."""
        if self.in_flight is None:
            return set()
        chunks = {row.slot for row in self.in_flight.prefill}
        return chunks | {row.slot for row in self.in_flight.decode}

    def by_order(self) -> Iterator[tuple[int, Sequence]]:
        return iter(sorted(self.running.items(), key=lambda item: item[1].order))

    def num_blocks_lacking(self, sequence: Sequence) -> int:
        """Blocks to add so that the KV of all known ids has a place."""
        return max(0, ceil(sequence.num_known / self.capacity.block_size) - len(sequence.blocks))

    def place(self, sequence: Sequence, blocks: list[int]) -> int:
        slot = self._free_slots.pop()
        sequence.slot, sequence.blocks = slot, blocks
        self.running[slot] = sequence
        return slot

    def remove(self, sequence: Sequence) -> None:
        """Frees slot and blocks. Only while no plan that names them is in flight."""
        assert sequence.slot is not None
        del self.running[sequence.slot]
        self._released.append(sequence.slot)
        self.pool.give_back(sequence.blocks)
        sequence.leave_worker()
