"""A worker without a model: checks every plan against the contract, emits tokens by a rule."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.planner import PLAN_S
from services.scheduler.scheduler import Planned
from shared.wire.kv_groups import copy_interval, num_passed
from shared.wire.messages import (
    ALL_TOKENS,
    Admit,
    Capacity,
    Decode,
    Drop,
    FinishReason,
    Group,
    Prefill,
    ResultRow,
    RunKind,
    StepPlan,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays, join

Part = tuple[ResultRow, TokenArrays]
State = tuple[int, int]  # the number of ids that it has seen, and a hash of them


def next_token(ids: list[int]) -> int:
    """The model's next token: depends on all known ids, so a wrong resumption shows."""
    return (sum(ids) * 31 + len(ids)) % 1000


def next_draft(ids: list[int]) -> int:
    """The drafter's next token: occasionally wrong."""
    token_id = next_token(ids)
    return token_id if (sum(ids) + 7 * len(ids)) % 10 < 7 else token_id + 1


def state_of(ids: list[int]) -> State:
    context = 0
    for token_id in ids:
        context = hash((context, token_id))
    return len(ids), context


def is_stop_id(token_id: int, stop: int) -> bool:
    return stop > 0 and token_id % stop == 0


@dataclass
class Slot:
    admit: Admit
    ids: list[int]
    tables: list[list[int]]  # of each group of layers
    num_computed: int = 0
    num_prompt_scored: int = 0
    contexts: list[int] = field(default_factory=list)  # a hash of the ids up to each computed one
    has_finished: bool = False
    drafts: list[int] = field(default_factory=list)  # after ``ids``
    is_repeated: bool = False  # its last step gave no token
    state: "State" = (0, 0)
    copies_to: int | None = None


@dataclass
class SimulatedWorker:
    """Raises AssertionError for a plan that breaks the step contract.

    ``kv`` holds, for each place of each block, a hash of all ids up to it, the input of its KV.
    After rejected drafts it is invalid until overwritten. Each token reads the KV of its window in
    each group of layers. ``states`` are the copies of states. ``draft_depth`` is the last plan's.
    An output ends with the first multiple of ``stop``; 0: none does. If it ``repeats``, some steps
    with drafts give no token, and their token is computed again. ``write`` returns the next id of a
    slot.
    """

    capacity: Capacity
    stop: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    kv: dict[int, list[int]] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    draft_depth: int = 0
    is_fast: bool = False
    repeats: bool = False
    write: Callable[[Slot], int] = lambda slot: next_token(slot.ids)

    def step(self, planned: Planned) -> tuple[StepResult, TokenArrays]:
        plan = planned.plan
        for slot in plan.release:
            del self.slots[slot]
        for drop in plan.drops:
            self._drop(drop)
        for keep in plan.keeps:
            self.slots[keep.slot].copies_to = keep.to_state
        self._admit(planned)
        for extend in plan.extend:
            lists = [extend.blocks, *extend.more_blocks]
            for table, blocks in zip(self.slots[extend.slot].tables, lists, strict=True):
                table.extend(blocks)
                self._clear(blocks)
        for admit in plan.admit:
            self._find_cached(self.slots[admit.slot])
        num_tokens = self._check_rows(plan)
        parts = [part for row in plan.prefill for part in self._prefill(row, plan.draft_depth)]
        num_steps = 0
        while not num_steps or (num_steps < plan.num_steps and self._has_open(plan)):
            parts += [part for row in plan.decode for part in self._decode(row, plan.draft_depth)]
            num_steps += 1
        self.draft_depth = plan.draft_depth
        parts.sort(key=lambda part: (self.slots[part[0].slot].admit.route, part[0].slot))
        step_s = num_steps * (PLAN_S / 3.5 if self.is_fast else 10 + num_tokens)
        rows = [row for row, _ in parts]
        result = StepResult(plan.step, rows, step_s=step_s, num_steps=num_steps)
        return result, join([arrays for _, arrays in parts]) if parts else TokenArrays()

    def _has_open(self, plan: StepPlan) -> bool:
        return any(not self.slots[row.slot].has_finished for row in plan.decode)

    def _check_rows(self, plan: StepPlan) -> int:
        """Returns the number of tokens."""
        slots = [row.slot for row in plan.prefill] + [row.slot for row in plan.decode]
        assert len(set(slots)) == len(slots)
        copies = [self.slots[each].copies_to for each in slots]
        copies = [each for each in copies if each is not None]
        assert len(set(copies)) == len(copies), "two sequences write to one copy"
        assert all(row.num_tokens > 0 for row in plan.prefill)
        assert all(0 <= row.verify_depth <= self.draft_depth for row in plan.decode)
        assert 0 <= plan.draft_depth <= self.capacity.num_speculative_tokens
        num_tokens = sum(row.num_tokens for row in plan.prefill)
        num_tokens += sum(1 + row.verify_depth for row in plan.decode)
        assert num_tokens <= self.capacity.max_num_batched_tokens
        assert 1 <= plan.num_steps <= self.capacity.max_num_steps
        if plan.num_steps > 1:
            assert not plan.prefill
            assert all(row.verify_depth == plan.draft_depth for row in plan.decode)
        return num_tokens

    def _admit(self, planned: Planned) -> None:
        start = 0
        for admit in planned.plan.admit:
            assert admit.slot not in self.slots, "a slot was given away twice"
            ids = planned.ids[start : start + admit.num_ids].tolist()
            start += admit.num_ids
            tables = [list(blocks) for blocks in (admit.blocks, *admit.more_blocks)]
            self.slots[admit.slot] = Slot(
                admit, ids, tables, admit.num_cached, admit.num_prompt_scored
            )
            assert admit.num_cached < admit.num_ids
            self._begin_state(self.slots[admit.slot])
            for table in tables:
                self._clear(table[-(-admit.num_cached // self.capacity.block_size) :])
        assert start == len(planned.ids)
        assert len(self.slots) <= self.capacity.max_num_seqs

    def _begin_state(self, slot: Slot) -> None:
        source = slot.admit.from_state
        slot.copies_to = slot.admit.to_state
        if self.capacity.num_states is None:
            assert source is None
            assert slot.copies_to is None
        elif slot.num_computed:
            assert source is not None
            slot.state = self.states[source]
            assert slot.state == state_of(slot.ids[: slot.num_computed]), "the state of other ids"

    def _advance(self, slot: Slot, end: int) -> None:
        """The state sees the ids up to ``end``. It lacks the drafts accepted in the last step."""
        if self.capacity.num_states is None:
            return
        (first, context), most_drafts = slot.state, self.capacity.num_speculative_tokens
        assert slot.num_computed - most_drafts <= first <= slot.num_computed + slot.is_repeated
        interval = copy_interval(self.capacity.block_size)
        for num, token_id in enumerate(slot.ids[first:end], first + 1):
            context = hash((context, token_id))
            if slot.copies_to is not None and num % interval == 0:
                self.states[slot.copies_to] = num, context
        slot.state = end, context

    def _drop(self, drop: Drop) -> None:
        table = self.slots[drop.slot].tables[drop.group]
        assert self.capacity.groups[drop.group].window is not None
        assert self._num_null(table) < drop.num_blocks <= len(table)
        table[: drop.num_blocks] = [self.capacity.num_blocks] * drop.num_blocks

    def _num_null(self, table: list[int]) -> int:
        """The null blocks come first."""
        num = table.count(self.capacity.num_blocks)
        assert table[:num] == [self.capacity.num_blocks] * num
        return num

    def _clear(self, blocks: list[int]) -> None:
        owned = Counter(
            block for slot in self.slots.values() for table in slot.tables for block in table
        )
        for block in blocks:
            assert block < self.capacity.num_blocks
            assert owned[block] == 1, "a block that is written to has two owners"
            self.kv[block] = []

    def _find_cached(self, slot: Slot) -> None:
        """An MTP head computes the last cached id once more."""
        context, size, num = 0, self.capacity.block_size, slot.num_computed
        for token_id in slot.ids[:num]:
            context = hash((context, token_id))
            slot.contexts.append(context)
        for group, table in zip(self.capacity.groups, slot.tables, strict=True):
            assert self._num_null(table) == num_passed(group, num, size)
            self._read(slot, group, table, num - 1)
            assert not any(self.kv[block] for block in table[-(-num // size) :])

    def _read(self, slot: Slot, group: Group, table: list[int], position: int) -> None:
        """Checks the KV that the token at ``position`` sees, without its own."""
        size = self.capacity.block_size
        first = 0 if group.window is None else max(0, position + 1 - group.window)
        for seen in range(first, position):
            context = self.kv[table[seen // size]][seen % size]
            assert context == slot.contexts[seen], "the KV of other ids"

    def _write(self, slot: Slot, ids: list[int]) -> None:
        """The tokens after the computed ones, of which attention reads only those of its window."""
        context = slot.contexts[-1] if slot.contexts else 0
        for position, token_id in enumerate(ids, slot.num_computed):
            context = hash((context, token_id))
            slot.contexts[position:] = [context]
            for group, table in zip(self.capacity.groups, slot.tables, strict=True):
                self._write_one(table, position, context)
                if group.window is not None:
                    self._read(slot, group, table, position)
        del slot.contexts[slot.num_computed :]

    def _write_one(self, table: list[int], position: int, context: int) -> None:
        number, place = divmod(position, self.capacity.block_size)
        assert number < len(table), "a token has no place"
        kv = self.kv[table[number]]
        if place < len(kv):
            assert self.capacity.num_speculative_tokens
            owned = [each for slot in self.slots.values() for each in slot.tables]
            assert kv[place] == context or sum(table[number] in each for each in owned) == 1, (
                "an overwritten block has two owners"
            )
        else:
            assert place == len(kv)
        kv[place : place + 1] = [context]

    def _keep(self, slot: Slot, num: int) -> None:
        """Keeps the first written ids as the slot's ids."""
        context = slot.contexts[-1] if slot.contexts else 0
        for token_id in slot.ids[slot.num_computed : slot.num_computed + num]:
            context = hash((context, token_id))
            slot.contexts.append(context)
        slot.num_computed += num

    def _prefill(self, row: Prefill, draft_depth: int) -> list[Part]:
        """The scored prompt tokens, and the token if the row has computed all ids."""
        slot = self.slots[row.slot]
        if slot.has_finished:
            return []
        end = slot.num_computed + row.num_tokens
        assert end <= len(slot.ids)
        self._advance(slot, end)
        self._write(slot, slot.ids[slot.num_computed : end])
        self._keep(slot, row.num_tokens)
        parts = self._tell(row.slot, row.num_tokens)
        if slot.num_computed == len(slot.ids) and not slot.has_finished:
            parts.append(self._sample(row.slot, [], draft_depth))
        return parts

    def _decode(self, row: Decode, draft_depth: int) -> list[Part]:
        """The scored prompt token, if the row is the last prompt id, and the tokens."""
        slot = self.slots[row.slot]
        if slot.has_finished:
            return []
        assert slot.num_computed + 1 == len(slot.ids)
        drafts = slot.drafts[: min(row.verify_depth, self._num_left(slot) - 1)]
        self._advance(slot, len(slot.ids))
        self._write(slot, [slot.ids[-1], *drafts])
        if self.repeats and drafts and not slot.is_repeated and sum(slot.ids) % 4 == 0:
            slot.is_repeated, slot.drafts = True, []
            run = TokenRun(0, num_drafts=len(drafts))
            again = ResultRow(row.slot, slot.admit.request, slot.admit.attempt, run)
            return [(again, TokenArrays(np.zeros(0, np.int32)))]
        slot.is_repeated = False
        self._keep(slot, 1)
        parts = self._tell(row.slot, 1)
        if not slot.has_finished:
            parts.append(self._sample(row.slot, drafts, draft_depth))
            self._keep(slot, len(slot.ids) - 1 - slot.num_computed)
        return parts

    def _num_left(self, slot: Slot) -> int:
        """Tokens until it is full."""
        limit, asked = self.capacity.max_model_len, slot.admit.params.max_tokens
        end = limit if asked is None else min(limit, slot.admit.prompt_len + asked)
        return end - len(slot.ids)

    def _sample(self, slot_id: int, drafts: list[int], draft_depth: int) -> Part:
        """Tokens as long as they equal the drafts, and one more."""
        slot = self.slots[slot_id]
        self._check_reserved_blocks(slot, len(drafts) + draft_depth)
        start = len(slot.ids)
        for draft in (*drafts, None):
            slot.ids.append(self.write(slot))
            if self._finish(slot) or slot.ids[-1] != draft:
                break
        tokens, finish = slot.ids[start:], self._finish(slot)
        slot.has_finished = finish is not None
        self._draft(slot, draft_depth)
        num_accepted = sum(token == draft for token, draft in zip(tokens, drafts, strict=False))
        name = (slot_id, slot.admit.request, slot.admit.attempt)
        row = ResultRow(
            *name, TokenRun(len(tokens), num_drafts=len(drafts), num_accepted=num_accepted), finish
        )
        return row, TokenArrays(np.array(tokens, np.int32))

    def _check_reserved_blocks(self, slot: Slot, num_ahead: int) -> None:
        """Drafts have KV too, and the drafter writes at least one place ahead."""
        if self.capacity.num_speculative_tokens:
            num_positions = len(slot.ids) + min(num_ahead, self._num_left(slot))
            num_blocks = min(map(len, slot.tables))
            assert num_positions <= num_blocks * self.capacity.block_size

    def _draft(self, slot: Slot, num: int) -> None:
        """A sequence with one token to go needs no draft."""
        ids = list(slot.ids)
        for _ in range(min(num, self._num_left(slot) - 1)):
            ids.append(next_draft(ids))
        slot.drafts = ids[len(slot.ids) :]

    def _finish(self, slot: Slot) -> FinishReason | None:
        if is_stop_id(slot.ids[-1], self.stop):
            return "stop"
        return "length" if self._num_left(slot) <= 0 else None

    def _widths(self, asked: int) -> tuple[int, int]:
        vocab_size = self.capacity.vocab_size
        is_all = asked == ALL_TOKENS or (vocab_size and asked >= vocab_size)
        return (1 + vocab_size, 0) if is_all else (1 + asked, asked)

    def _tell(self, slot_id: int, num: int) -> list[Part]:
        """Scores the ids after the ``num`` computed last, if they are not scored yet."""
        slot, admit = self.slots[slot_id], self.slots[slot_id].admit
        asked, last = admit.params.prompt_logprobs, min(slot.num_computed, admit.prompt_len - 1)
        ids = [] if asked is None else slot.ids[slot.num_prompt_scored + 1 : last + 1]
        assert not ids or slot.num_computed - num <= slot.num_prompt_scored, (
            "the cache tells no logprobs"
        )
        slot.num_prompt_scored += len(ids)
        slot.has_finished = admit.params.max_tokens == 0 and slot.num_computed == admit.prompt_len
        if not ids and not slot.has_finished:
            return []
        num_values, num_top = self._widths(asked) if asked is not None and ids else (0, 0)
        finish: FinishReason | None = "length" if slot.has_finished else None
        name = (slot_id, admit.request, admit.attempt)
        row = ResultRow(*name, TokenRun(len(ids), num_values, num_top, kind=RunKind.PROMPT), finish)
        numbers = np.zeros(len(ids) * num_values, np.int32)
        top_ids, ranks = numbers[: len(ids) * num_top], numbers[: len(ids)]
        arrays = TokenArrays(np.array(ids, np.int32), numbers.astype(np.float32), top_ids, ranks)
        return [(row, arrays)]
