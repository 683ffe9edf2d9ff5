"""Copies changes of the host's slot table to the device: admitted sequences, added blocks."""

from itertools import count, repeat

import numpy as np
import torch
from torch import Tensor

from kernels.grammar_mask import HIDDEN
from kernels.logprobs.num_logprobs import NO_LOGPROBS
from kernels.sample.slot_rules import EMITTED, IN_PROMPT, IS_END, SlotRules
from kernels.slot_state import NO_ID, SlotState, empty_slots
from services.worker.machine.streams import Download, Fetched, upload
from services.worker.slots.logits_rules import LogitsRules
from services.worker.slots.table import SlotTable
from services.worker.step.rows import Rows, plan_rows
from shared.wire.messages import MAX_STOP_IDS, Capacity, StepPlan

OWN_ONLY = 0
BlockEntry = tuple[int, int, int, int]  # group, slot, index in its block table, and the block


class DeviceSlots:
    """``state`` is changed by steps on the device, and between steps by the methods below."""

    def __init__(
        self, capacity: Capacity, table: SlotTable, eos_ids: np.ndarray, device: torch.device
    ) -> None:
        """``eos_ids`` [E] int64."""
        self._device = device
        self._eos_ids = eos_ids
        # Slots with logits rules that the host applies.
        self.has_host_rules = np.zeros(capacity.max_num_seqs, bool)
        self._num_dropped = np.zeros(table.num_blocks.shape, np.int64)  # of each group and slot
        self.state: SlotState = empty_slots(
            num_slots=capacity.max_num_seqs,
            vocab_size=0
            if capacity.pooled_size
            else capacity.vocab_size,  # pooling has no logits rules
            max_drafts=capacity.num_speculative_tokens,
            num_groups=len(capacity.groups),
            max_blocks=table.block_tables.shape[2],
            null_block=table.null_block,
            max_stop_ids=MAX_STOP_IDS,
            device=device,
        )

    def update(self, table: SlotTable, plan: StepPlan) -> None:
        """``plan`` must be applied to ``table`` already."""
        changed = self._dropped(table, plan)
        if plan.admit:
            self._admit(table, np.array([row.slot for row in plan.admit]))
        if plan.extend:
            changed += _added(table, plan)
        if changed:
            self._upload_blocks(changed)

    def close(self) -> None:
        self.state.is_open.zero_()

    def set_pairs(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """Sets the ranges of the MTP head's pairs of ``slots`` [A]."""
        rows = upload(slots, self._device)
        self._put(self.state.mtp_starts, rows, starts)
        self._put(self.state.mtp_ends, rows, ends)

    def set_drafts(self, table: SlotTable, slots: np.ndarray) -> None:
        """Uploads the host's drafts of ``slots`` [B]."""
        rows = upload(slots, self._device)
        columns = table.num_tokens[slots][:, None] + np.arange(self.state.max_drafts)
        drafts = table.ids[slots[:, None], np.minimum(columns, table.max_len)]
        self.state.ids[rows, 1:] = upload(drafts, self._device)
        self._put(self.state.num_drafts, rows, table.num_drafts[slots])
        self._put(self.state.draft_logprobs, rows, table.draft_logprobs[slots])
        self._put(self.state.draft_ranks, rows, table.draft_ranks[slots])

    def fetch_drafts(self, slots: np.ndarray) -> Fetched:
        """Fetches the drafts [n, most drafts] of ``slots`` [n], and their numbers [n]."""
        rows = upload(slots, self._device)
        return Download(self.state.ids[rows, 1:], self.state.num_drafts[rows])

    def fetch_draft_scores(self, slots: np.ndarray) -> Fetched:
        """Fetches the logprobs and the ranks [n, most drafts] of the drafts of ``slots`` [n]."""
        rows = upload(slots, self._device)
        return Download(self.state.draft_logprobs[rows], self.state.draft_ranks[rows])

    def _admit(self, table: SlotTable, slots: np.ndarray) -> None:
        state, rows = self.state, upload(slots, self._device)
        last = table.ids[slots, table.num_tokens[slots] - 1]
        self.state.ids[rows, 0] = upload(last, self._device)
        for target, values in (
            (state.num_tokens, table.num_tokens),
            (state.num_drafts, table.num_drafts),
            (state.ends, table.end),
            (state.is_open, table.is_open),
            *zip(state.sampling, table.sampling, strict=True),
            (state.ignores_eos, table.ignore_eos),
            (state.num_logprobs, table.num_logprobs),
            (
                state.wants_draft_logprobs,
                np.where(table.wants_draft_logprobs, OWN_ONLY, NO_LOGPROBS),
            ),
        ):
            self._put(target, rows, values[slots])
        tables = table.block_tables[:, slots]
        state.block_tables[:, rows] = upload(tables, self._device).int()
        self._num_dropped[:, slots] = 0
        stop_ids = np.full((len(slots), MAX_STOP_IDS), NO_ID)
        for row, slot in enumerate(slots.tolist()):
            ids = table.params[slot].stop_token_ids
            stop_ids[row, : len(ids)] = ids
        self._put(state.stop_ids, rows, stop_ids)
        self._put(state.rules.is_changed, rows, np.zeros(len(slots), np.int32))
        for slot in slots.tolist():
            self._admit_rules(table, slot)

    def _admit_rules(self, table: SlotTable, slot: int) -> None:
        rules = table.logits_rules[slot]
        self.has_host_rules[slot] = rules is not None and not is_for_device(rules)
        if rules is None or self.has_host_rules[slot]:
            return
        ids, prompt_len = table.ids[slot, : table.num_tokens[slot]], int(table.prompt_lens[slot])
        row = rule_row(rules, ids, prompt_len, self._eos_ids, self.state.rules.seen.shape[1])
        for target, values in zip(self.state.rules, row, strict=True):
            target[slot] = upload(np.asarray(values), self._device).to(target.dtype)

    def _put(self, target: Tensor, rows: Tensor, values: np.ndarray) -> None:
        target[rows] = upload(values, self._device).to(target.dtype)

    def _dropped(self, table: SlotTable, plan: StepPlan) -> list[BlockEntry]:
        """The null block in place of the blocks that ``plan`` drops."""
        entries: list[BlockEntry] = []
        for row in plan.drops:
            columns = range(self._num_dropped[row.group, row.slot], row.num_blocks)
            entries += zip(repeat(row.group), repeat(row.slot), columns, repeat(table.null_block))
            self._num_dropped[row.group, row.slot] = row.num_blocks
        return entries

    def _upload_blocks(self, entries: list[BlockEntry]) -> None:
        *places, blocks = upload(np.array(entries, np.int64).T, self._device)
        self.state.block_tables[tuple(places)] = blocks.int()


def _added(table: SlotTable, plan: StepPlan) -> list[BlockEntry]:
    """The new blocks, the last of each table; a slot may occur more than once."""
    slots = [row.slot for row in plan.extend]
    ends = dict(zip(slots, table.num_blocks[:, slots].T.tolist(), strict=True))
    entries: list[BlockEntry] = []
    for row in reversed(plan.extend):
        of_slot = ends[row.slot]
        for group, blocks in enumerate((row.blocks, *row.more_blocks)):
            of_slot[group] -= len(blocks)
            entries += zip(repeat(group), repeat(row.slot), count(of_slot[group]), blocks)
    return entries


class SlotBounds:
    """The ``Lengths`` of slots as the host knows them when a plan arrives: exact until the ids at
    admission are computed, then upper bounds."""

    def __init__(self, capacity: Capacity) -> None:
        self.num_tokens = np.zeros(capacity.max_num_seqs, np.int64)
        self.num_computed = np.zeros(capacity.max_num_seqs, np.int64)
        self.num_drafts = np.zeros(capacity.max_num_seqs, np.int64)
        self._decodes = np.zeros(capacity.max_num_seqs, bool)
        self._max_drafts = capacity.num_speculative_tokens

    def admit(self, plan: StepPlan) -> None:
        for row in plan.admit:
            self.num_tokens[row.slot] = row.num_ids
            self.num_computed[row.slot] = row.num_cached
            self.num_drafts[row.slot] = 0
            self._decodes[row.slot] = False

    def rows_of(self, table: SlotTable, plan: StepPlan, recomputes_states: bool) -> Rows:
        """The rows of ``plan``, as if all earlier steps had run: decode rows, then prompt chunks.
        ``plan`` must be applied to ``table`` already."""
        rows = plan_rows(table, self, plan, recomputes_states, self._decoding_first)
        rows = rows._replace(num_decoding=int(self._decodes[rows.slots].sum()))
        table.lacks_state[rows.slots] = False
        self.num_computed[rows.slots] = rows.ends
        slots = rows.sampling_slots
        most = self.num_tokens[slots] + 1 + rows.num_drafts[rows.sampling_rows]
        self.num_tokens[slots] = np.minimum(most, table.end[slots] - 1)
        self.num_computed[slots] = self.num_tokens[slots] - 1
        self.num_drafts[slots] = self._max_drafts
        self._decodes[slots] = True
        return rows

    def _decoding_first(
        self, slots: np.ndarray, num_tokens: np.ndarray, num_keys: np.ndarray
    ) -> np.ndarray:
        order: np.ndarray = np.argsort(~self._decodes[slots], kind="stable")
        return order


Value = np.ndarray | float


def is_for_device(rules: LogitsRules) -> bool:
    """True if the device can apply all rules. The host applies grammars, and bad words of several
    ids, because these depend on the emitted ids."""
    return rules.guide is None and not rules.word_starts.shape[1]


def rule_row(
    rules: LogitsRules, ids: np.ndarray, prompt_len: int, eos_ids: np.ndarray, vocab_size: int
) -> SlotRules[Value]:
    """The device's rules of a sequence: ``ids`` [n] int32, the first ``prompt_len`` its prompt."""
    params = rules.params
    seen = EMITTED * np.bincount(ids[prompt_len:], minlength=vocab_size)
    seen[ids[:prompt_len]] |= IN_PROMPT
    seen[rules.stop_ids] |= IS_END
    seen[eos_ids] |= IS_END
    biases = np.zeros(vocab_size, np.float32)
    if len(rules.allowed):
        biases.fill(HIDDEN)
        biases[rules.allowed] = 0
    biases[rules.word_ends] = HIDDEN
    biases[rules.biased] += rules.biases
    return SlotRules(
        is_changed=1,
        seen=seen,
        biases=biases,
        min_ends=prompt_len + params.min_tokens,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
