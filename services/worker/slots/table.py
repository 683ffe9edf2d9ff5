"""The host's state of slots: ids, lengths, block tables, sampling parameters.

Everything is an array over slots, so that preparing a batch takes a few array operations.
"""

import numpy as np

from kernels.logprobs.num_logprobs import NO_LOGPROBS
from kernels.sample.slot_params import FILTERS, SlotParams, host_params
from services.worker.slots.guide import Guides, SlotGuide
from services.worker.slots.logits_rules import LogitsRules, make_logits_rules
from shared.wire.messages import Admit, Capacity, Extend, SamplingParams, StepPlan


class SlotTable:
    """The host's state of all slots. The scheduler owns slots and blocks, and sends differences.

    ``is_open`` slots take part in steps. A slot closes when its sequence ends, and stays closed
    until another is admitted to it, though later plans may name it. ``guides`` makes the guides of
    sequences; None without sampling.
    """

    def __init__(self, capacity: Capacity, guides: Guides | None = None) -> None:
        num_slots, max_len = capacity.max_num_seqs, capacity.max_model_len
        max_blocks = max_len // capacity.block_size + 1  # a drafter looks one place ahead
        self._guides = guides
        self.null_block = capacity.num_blocks
        self.block_size = capacity.block_size
        self.max_len = max_len
        self.vocab_size = capacity.vocab_size
        self.requests = [("", 0)] * num_slots  # (request, attempt)
        self.routes = np.zeros(num_slots, np.int64)
        self.is_open = np.zeros(num_slots, bool)
        self.ids = np.zeros((num_slots, max_len + 1), np.int32)  # known ids, then drafts
        self.num_tokens = np.zeros(num_slots, np.int64)  # known ids
        self.num_drafts = np.zeros(num_slots, np.int64)
        max_drafts = max(1, capacity.num_speculative_tokens)
        self.draft_logprobs = np.zeros((num_slots, max_drafts), np.float32)
        self.draft_ranks = np.zeros((num_slots, max_drafts), np.int32)
        self.wants_draft_logprobs = np.zeros(num_slots, bool)
        # True if the hidden state before the first id to compute is missing: its KV was cached.
        self.lacks_state = np.zeros(num_slots, bool)
        self.num_computed = np.zeros(num_slots, np.int64)  # known ids with KV in the cache
        self.end = np.zeros(num_slots, np.int64)  # number of ids of a full sequence
        num_groups = len(capacity.groups)
        self.num_blocks = np.zeros((num_groups, num_slots), np.int64)
        tables = num_groups, num_slots, max_blocks
        self.block_tables = np.full(tables, self.null_block, np.int64)
        self.sampling = host_params(num_slots)
        self.ignore_eos = np.zeros(num_slots, bool)
        self.params = [SamplingParams(seed=0)] * num_slots
        self.prompt_lens = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, np.int64)
        self.has_logprob_ids = np.zeros(num_slots, bool)  # for the ids in params
        self.num_prompt_logprobs = np.full(num_slots, NO_LOGPROBS, np.int64)
        self.num_prompt_scored = np.zeros(num_slots, np.int64)  # prompt tokens, from the second on
        self.logits_rules: list[LogitsRules | None] = [None] * num_slots
        self.has_logits_rules = np.zeros(num_slots, bool)
        self.has_stop_ids = np.zeros(num_slots, bool)
        self.ends_repetition = np.zeros(num_slots, bool)
        # True if the slot needs more than sampled ids, or an end that its ids alone do not show.
        self.wants_more = np.zeros(num_slots, bool)

    def apply(self, plan: StepPlan, ids: np.ndarray) -> np.ndarray:
        """Releases, then drops blocks, then admits, then extends. ``ids`` [sum of num_ids] belong
        to the admitted rows.

        Returns the blocks [N] int64 with a new owner and no content for it.
        """
        self.is_open[plan.release] = False
        start = 0
        fresh: list[int] = []
        for drop in plan.drops:
            self.block_tables[drop.group, drop.slot, : drop.num_blocks] = self.null_block
        for row in plan.admit:
            self._admit(row, ids[start : start + row.num_ids])
            start += row.num_ids
            for blocks in (row.blocks, *row.more_blocks):
                fresh += blocks[-(-row.num_cached // self.block_size) :]
        for extend in plan.extend:
            self._add_blocks(extend)
            for blocks in (extend.blocks, *extend.more_blocks):
                fresh += blocks
        return np.array(fresh, np.int64)

    def slot_mapping(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """block * block_size + offset [groups, T] of ``positions`` [T] of ``slots`` [T]; in the
        null block for positions without a block."""
        num_groups, _, max_blocks = self.block_tables.shape
        places = slots * max_blocks + positions // self.block_size
        blocks = self.block_tables.reshape(num_groups, -1).take(places, axis=1)
        slot_mapping: np.ndarray = blocks * self.block_size + positions % self.block_size
        return slot_mapping

    def append(self, slots: np.ndarray, tokens: np.ndarray, nums: np.ndarray) -> None:
        """Appends the first ``nums`` [Q] of ``tokens`` [Q, w] to each of ``slots``, and drops their
        drafts."""
        for column in range(tokens.shape[1]):
            rows = np.flatnonzero(nums > column)
            self.ids[slots[rows], self.num_tokens[slots[rows]] + column] = tokens[rows, column]
        self.num_tokens[slots] += nums
        self.num_drafts[slots] = 0
        for row in np.flatnonzero(self.has_logits_rules[slots]).tolist():
            if (rules := self.logits_rules[slots[row]]) is not None:
                rules.note(tokens[row, : nums[row]].tolist())

    def guide_of(self, slot: int) -> SlotGuide | None:
        rules = self.logits_rules[slot]
        return None if rules is None else rules.guide

    def _admit(self, row: Admit, ids: np.ndarray) -> None:
        slot, params = row.slot, row.params
        self.requests[slot] = row.request, row.attempt
        self.routes[slot] = row.route
        self.is_open[slot] = True
        self.ids[slot, : row.num_ids] = ids
        self.num_tokens[slot] = row.num_ids
        self.num_computed[slot] = row.num_cached
        self.num_drafts[slot] = 0
        self.wants_draft_logprobs[slot] = params.draft_logprobs
        self.lacks_state[slot] = row.num_cached > 0
        max_tokens = self.max_len if params.max_tokens is None else params.max_tokens
        self.end[slot] = min(row.prompt_len + max_tokens, self.max_len)
        self.block_tables[:, slot] = self.null_block
        self.num_blocks[:, slot] = 0
        self._add_blocks(row)
        for column, value in zip(self.sampling, _sampling_of(row), strict=True):
            column[slot] = value
        self.ignore_eos[slot] = params.ignore_eos
        self.params[slot] = params
        self.prompt_lens[slot] = row.prompt_len
        self.has_logprob_ids[slot] = bool(params.logprob_token_ids)
        self.num_logprobs[slot] = len(params.logprob_token_ids) or _num_asked(params.logprobs)
        self.num_prompt_logprobs[slot] = _num_asked(params.prompt_logprobs)
        self.num_prompt_scored[slot] = row.num_prompt_scored
        emitted = ids[row.prompt_len :]
        guide = None if self._guides is None else self._guides.begin(params, emitted)
        self.logits_rules[slot] = make_logits_rules(params, ids, row.prompt_len, guide)
        self.has_logits_rules[slot] = self.logits_rules[slot] is not None
        self.has_stop_ids[slot] = bool(params.stop_token_ids)
        self.ends_repetition[slot] = params.repetition is not None
        self.wants_more[slot] = (
            self.has_logits_rules[slot]
            or self.has_stop_ids[slot]
            or self.ends_repetition[slot]
            or self.wants_draft_logprobs[slot]
            or self.num_logprobs[slot] != NO_LOGPROBS
            or self.num_prompt_logprobs[slot] != NO_LOGPROBS
            or self.end[slot] == row.prompt_len
        )

    def _add_blocks(self, row: Admit | Extend) -> None:
        for group, blocks in enumerate((row.blocks, *row.more_blocks)):
            start = self.num_blocks[group, row.slot]
            self.block_tables[group, row.slot, start : start + len(blocks)] = blocks
            self.num_blocks[group, row.slot] += len(blocks)


def _sampling_of(row: Admit) -> SlotParams[float]:
    filters = {name: getattr(row.params, name) for name in FILTERS}
    return SlotParams(**filters, seeds=row.params.seed, choices=row.choice)


def _num_asked(logprobs: int | None) -> int:
    return NO_LOGPROBS if logprobs is None else logprobs
