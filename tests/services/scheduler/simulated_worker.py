"""A worker without a model: checks every plan against the contract, emits tokens by a rule."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.scheduler import Planned
from shared.messages import Admit, Capacity, ResultRow, StepResult
from shared.token_arrays import TokenArrays, join

Part = tuple[ResultRow, TokenArrays]


def next_token(ids: list[int]) -> int:
    """What this model writes: depends on all known ids, so a wrong resumption shows."""
    return (sum(ids) * 31 + len(ids)) % 1000


def is_stop_id(token_id: int, stop: int) -> bool:
    return stop > 0 and token_id % stop == 0


@dataclass
class Slot:
    admit: Admit
    ids: list[int]
    blocks: list[int]
    num_computed: int = 0
    context: int = 0  # a hash of the ids that are computed
    num_told: int = 0
    has_finished: bool = False


@dataclass
class SimulatedWorker:
    """Raises AssertionError for a plan that breaks the step contract.

    ``kv`` has, for each place of each block, what its KV depends on: a hash of all ids up to it.
    A text ends with the first multiple of ``stop``; 0: none does.
    """

    capacity: Capacity
    stop: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    kv: dict[int, list[int]] = field(default_factory=dict)

    def step(self, planned: Planned) -> tuple[StepResult, TokenArrays]:
        plan = planned.plan
        for slot in plan.release:
            del self.slots[slot]
        self._admit(planned)
        for extend in plan.extend:
            self.slots[extend.slot].blocks.extend(extend.blocks)
            self._clear(extend.blocks)
        for admit in plan.admit:
            self._find_cached(self.slots[admit.slot])
        rows = [(prefill.slot, prefill.num_tokens) for prefill in plan.prefill]
        rows += [(decode.slot, 1) for decode in plan.decode]
        assert len({slot for slot, _ in rows}) == len(rows)
        assert sum(num for _, num in rows) <= self.capacity.max_num_batched_tokens
        parts = [part for slot, num in rows for part in self._compute(slot, num)]
        parts.sort(key=lambda part: (self.slots[part[0].slot].admit.route, part[0].slot))
        result = StepResult(plan.step, [row for row, _ in parts])
        return result, join([arrays for _, arrays in parts]) if parts else TokenArrays()

    def _admit(self, planned: Planned) -> None:
        start = 0
        for admit in planned.plan.admit:
            assert admit.slot not in self.slots, "a slot was given away twice"
            ids = planned.ids[start : start + admit.num_ids].tolist()
            start += admit.num_ids
            slot = Slot(admit, ids, list(admit.blocks), admit.num_cached, 0, admit.num_told)
            self.slots[admit.slot] = slot
            assert admit.num_cached < admit.num_ids
            self._clear(admit.blocks[-(-admit.num_cached // self.capacity.block_size) :])
        assert start == len(planned.ids)
        assert len(self.slots) <= self.capacity.max_num_seqs

    def _clear(self, blocks: list[int]) -> None:
        owned = Counter(block for slot in self.slots.values() for block in slot.blocks)
        for block in blocks:
            assert owned[block] == 1, "a block that is written to has two owners"
            self.kv[block] = []

    def _find_cached(self, slot: Slot) -> None:
        found = [context for block in slot.blocks for context in self.kv[block]]
        for token_id in slot.ids[: slot.num_computed]:
            slot.context = hash((slot.context, token_id))
            assert slot.context == found.pop(0), "the KV of other ids"
        assert not found

    def _write(self, slot: Slot, num: int) -> None:
        for position in range(slot.num_computed, slot.num_computed + num):
            block = slot.blocks[position // self.capacity.block_size]
            slot.context = hash((slot.context, slot.ids[position]))
            assert len(self.kv[block]) == position % self.capacity.block_size
            self.kv[block].append(slot.context)
        slot.num_computed += num

    def _compute(self, slot_id: int, num: int) -> list[Part]:
        """What is told of the prompt, and the token where the row has computed all ids."""
        slot = self.slots[slot_id]
        assert num > 0
        if slot.has_finished:
            return []
        assert slot.num_computed + num <= len(slot.ids)
        assert slot.num_computed + num <= len(slot.blocks) * self.capacity.block_size
        self._write(slot, num)
        parts = self._tell(slot_id, num)
        if slot.num_computed == len(slot.ids) and not slot.has_finished:
            slot.ids.append(next_token(slot.ids))
            parts.append((self._row(slot_id), TokenArrays(np.array(slot.ids[-1:], np.int32))))
        return parts

    def _tell(self, slot_id: int, num: int) -> list[Part]:
        """Of the ids that follow the ``num`` that were computed last, where they are lacking."""
        slot, admit = self.slots[slot_id], self.slots[slot_id].admit
        asked, last = admit.params.prompt_logprobs, min(slot.num_computed, admit.prompt_len - 1)
        ids = [] if asked is None else slot.ids[slot.num_told + 1 : last + 1]
        assert not ids or slot.num_computed - num <= slot.num_told, "the cache tells no logprobs"
        slot.num_told += len(ids)
        slot.has_finished = admit.params.max_tokens == 0 and slot.num_computed == admit.prompt_len
        if not ids and not slot.has_finished:
            return []
        num_values, num_top = (1 + asked, asked) if asked is not None and ids else (0, 0)
        finish = "length" if slot.has_finished else None
        name = (slot_id, admit.request, admit.attempt)
        row = ResultRow(*name, len(ids), finish, None, num_values, num_top, True)
        numbers = np.zeros(len(ids) * num_values, np.int32)
        top_ids, ranks = numbers[: len(ids) * num_top], numbers[: len(ids)]
        arrays = TokenArrays(np.array(ids, np.int32), numbers.astype(np.float32), top_ids, ranks)
        return [(row, arrays)]

    def _row(self, slot_id: int) -> ResultRow:
        slot = self.slots[slot_id]
        num_emitted = len(slot.ids) - slot.admit.prompt_len
        asked = slot.admit.params.max_tokens
        max_tokens = self.capacity.max_model_len if asked is None else asked
        is_over = num_emitted >= max_tokens or len(slot.ids) >= self.capacity.max_model_len
        is_stop = is_stop_id(slot.ids[-1], self.stop)
        slot.has_finished = is_over or is_stop
        finish = "stop" if is_stop else "length" if is_over else None
        return ResultRow(slot_id, slot.admit.request, slot.admit.attempt, 1, finish)
