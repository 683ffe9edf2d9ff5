"""Validates plans before the engine runs them: their numbers index tables and memory, and native
code does not check them."""

from dataclasses import dataclass

import numpy as np

from shared.errors import CodecError
from shared.wire.faults import ids_fault, params_fault, pooling_fault, reads_all
from shared.wire.kv_groups import copy_interval, num_passed
from shared.wire.messages import Admit, Capacity, Drop, Extend, Group, StepPlan


@dataclass(slots=True)
class _Held:
    """The state of a slot according to the plans. ``num_left`` ids of its admission are not
    computed yet; after them each row computes the last sampled id. ``num_blocks`` and, of these,
    ``num_dropped`` are of each group of layers."""

    num_left: int
    num_blocks: list[int]
    num_dropped: list[int]


class PlanCheck:
    """Follows the plans of one scheduler. ``check`` raises CodecError for a plan that does not fit
    the slots and blocks left by the plans before it."""

    def __init__(self, capacity: Capacity, vocab_size: int) -> None:
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._max_blocks = capacity.max_model_len // capacity.block_size + 1
        self._slots: dict[int, _Held] = {}

    def clear(self) -> None:
        """The next scheduler knows of no slot."""
        self._slots.clear()

    def check(self, plan: StepPlan, ids: np.ndarray) -> None:
        """``ids`` are the plan's first buffer."""
        for slot in plan.release:
            self._find(slot)
            del self._slots[slot]
        self._check_num_steps(plan)
        self._check_ids(plan, ids)
        for drop in plan.drops:
            self._drop(drop)
        for keep in plan.keeps:
            self._find(keep.slot)
            self._check_state(keep.to_state)
        for row in plan.admit:
            self._admit(row)
        for extend in plan.extend:
            self._extend(extend)
        self._check_rows(plan)

    def _find(self, slot: int) -> _Held:
        held = self._slots.get(slot)
        if held is None:
            raise CodecError(f"slot {slot} was not admitted")
        return held

    def _check_num_steps(self, plan: StepPlan) -> None:
        most = self._capacity.max_num_steps
        if plan.num_steps > most:
            raise CodecError(f"a plan of {plan.num_steps} steps; the limit is {most}")
        if plan.num_steps > 1 and plan.prefill:
            raise CodecError(f"a plan of {plan.num_steps} steps computes prompts")

    def _check_ids(self, plan: StepPlan, ids: np.ndarray) -> None:
        num_ids = sum(row.num_ids for row in plan.admit)
        if num_ids != len(ids):
            raise CodecError(f"the admitted rows count {num_ids} ids, and {len(ids)} came")
        if fault := ids_fault(ids, self._vocab_size):
            raise CodecError(fault)

    def _drop(self, drop: Drop) -> None:
        held, groups = self._find(drop.slot), self._capacity.groups
        if drop.group >= len(groups) or groups[drop.group].window is None:
            raise CodecError(f"group {drop.group} has no window, or does not exist")
        least, most = held.num_dropped[drop.group], held.num_blocks[drop.group]
        if not least <= drop.num_blocks <= most:
            raise CodecError(
                f"slot {drop.slot} drops {drop.num_blocks} blocks of group {drop.group}, where it"
                f" has {most} and dropped {least}"
            )
        held.num_dropped[drop.group] = drop.num_blocks

    def _extend(self, row: Extend) -> None:
        held, of_groups = self._find(row.slot), self._blocks_of(row)
        for group, blocks in enumerate(of_groups):
            held.num_blocks[group] += len(blocks)
            self._check_blocks(blocks, held.num_blocks[group])

    def _blocks_of(self, row: Admit | Extend) -> list[list[int]]:
        """The new blocks of each group."""
        of_groups, num = [row.blocks, *row.more_blocks], len(self._capacity.groups)
        if len(of_groups) != num:
            raise CodecError(f"slot {row.slot} has blocks in {len(of_groups)} groups of {num}")
        return of_groups

    def _admit(self, row: Admit) -> None:
        if row.slot >= self._capacity.max_num_seqs or row.slot in self._slots:
            raise CodecError(f"slot {row.slot} is taken or does not exist")
        of_groups = self._blocks_of(row)
        self._check_lengths(row, min(map(len, of_groups)))
        num_dropped = [
            self._check_passed(row, *each)
            for each in zip(self._capacity.groups, of_groups, strict=True)
        ]
        fault = params_fault(row.params, self._vocab_size)
        if fault := fault or pooling_fault(row.params, self._capacity.pooled_size):
            raise CodecError(fault)
        self._check_states(row)
        num_blocks = [len(blocks) for blocks in of_groups]
        self._slots[row.slot] = _Held(row.num_ids - row.num_cached, num_blocks, num_dropped)

    def _check_passed(self, row: Admit, group: Group, blocks: list[int]) -> int:
        """The number of leading blocks that the window has passed: exactly these are null."""
        num = num_passed(group, row.num_cached, self._capacity.block_size)
        if any(block != self._capacity.num_blocks for block in blocks[:num]):
            raise CodecError(f"slot {row.slot} has blocks behind a window; {num} are null blocks")
        self._check_blocks(blocks[num:], len(blocks))
        return num

    def _check_lengths(self, row: Admit, num_blocks: int) -> None:
        limit, max_tokens = self._capacity.max_model_len, row.params.max_tokens
        end = limit if max_tokens is None else min(limit, row.prompt_len + max_tokens)
        may_sample = row.num_ids < end or row.num_ids == row.prompt_len == end
        if not (0 < row.prompt_len <= row.num_ids and may_sample):
            raise CodecError(
                f"slot {row.slot} has {row.num_ids} ids, {row.prompt_len} of them the prompt; it is"
                f" full with {end}"
            )
        max_prompt_scored = row.prompt_len - 1
        is_scoring = (
            row.params.prompt_logprobs is not None and row.num_prompt_scored < max_prompt_scored
        )
        max_cached = min(
            row.num_prompt_scored if is_scoring else row.num_ids - 1,
            0 if reads_all(row.params) else row.num_ids - 1,
            num_blocks * self._capacity.block_size,
        )
        if row.num_prompt_scored > max_prompt_scored or row.num_cached > max_cached:
            raise CodecError(
                f"slot {row.slot}: of {row.prompt_len} ids of a prompt {row.num_prompt_scored} are"
                f" scored and {row.num_cached} cached"
            )

    def _check_states(self, row: Admit) -> None:
        self._check_state(row.from_state)
        self._check_state(row.to_state)
        if self._capacity.num_states is None:
            return
        is_whole = row.num_cached % copy_interval(self._capacity.block_size) == 0
        if not is_whole or (row.from_state is None) != (row.num_cached == 0):
            raise CodecError(
                f"slot {row.slot} begins with {row.num_cached} ids and state {row.from_state}"
            )

    def _check_state(self, state: int | None) -> None:
        num_states = self._capacity.num_states or 0
        if state is not None and state >= num_states:
            raise CodecError(f"state {state}; there is room for {num_states}")

    def _check_blocks(self, blocks: list[int], num_in_all: int) -> None:
        if num_in_all > self._max_blocks or max(blocks, default=0) >= self._capacity.num_blocks:
            raise CodecError(
                f"{num_in_all} blocks up to {max(blocks, default=0)}; a slot has"
                f" {self._max_blocks}, the cache {self._capacity.num_blocks}"
            )

    def _check_rows(self, plan: StepPlan) -> None:
        slots = self._slots
        num_tokens = num_drafts = 0
        for chunk in plan.prefill:
            held = self._find(chunk.slot)
            num_tokens += chunk.num_tokens
            if not 0 < chunk.num_tokens <= max(1, held.num_left):
                raise CodecError(
                    f"{chunk.num_tokens} tokens for slot {chunk.slot}, which lacks {held.num_left}"
                )
            held.num_left = max(0, held.num_left - chunk.num_tokens)
        for row in plan.decode:
            if row.slot not in slots:
                self._find(row.slot)
            num_drafts += row.verify_depth
            if slots[row.slot].num_left:
                slots[row.slot].num_left -= 1
        named = {row.slot for row in plan.decode} | {row.slot for row in plan.prefill}
        if len(named) != len(plan.decode) + len(plan.prefill):
            raise CodecError("a slot has two rows")
        num_tokens += len(plan.decode) + num_drafts
        if num_tokens > self._capacity.max_num_batched_tokens:
            raise CodecError(
                f"{num_tokens} tokens in a step; the limit is"
                f" {self._capacity.max_num_batched_tokens}"
            )
