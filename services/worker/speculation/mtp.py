"""Drafts by a model's MTP head (multi-token prediction), in MiMo's layout (arXiv 2505.07608).

The head is one decoder layer on pairs (h, t): the trunk's hidden state of a token and the token
after it. From a pair it predicts the token after t. For the next draft its own output takes the
place of h, and the draft that of t.

**KV.** The entry of the pair (h of q − 1, t of q) has place q of its layer's cache, so a block
depends only on the tokens up to its end and may be shared like the trunk's. Place 0 has no pair.
The rotary position is that of h. After a step the pairs of all its tokens, drafts included, are
computed from the trunk's states, in place of pairs drafted from the head's own output. Entries
beyond the accepted tokens are rewritten before any token attends to them.

**Prefix hits.** The first pair needs the state of the last cached token, which is recomputed for
it.

**Pauses.** While no drafts are planned nothing is computed, and later pairs are missing: see
``MtpCoverage``.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sample import NOT_COMPILED
from services.worker.layers.context import forward_context
from services.worker.machine.kv_cache import KVCache
from services.worker.models import DraftHead
from services.worker.slots.table import SlotTable
from services.worker.speculation.drafter import RecordedStep, rooms
from services.worker.step.batch import make_context
from services.worker.step.sampler import Sampler
from services.worker.step.sampling import Rules, random_rows_of
from services.worker.step.step import Places
from shared.wire.messages import Capacity, StepPlan


@dataclass(slots=True)
class Drafts:
    """Drafts of N sequences. The ``num``-th draft was made from ``out`` [N, size]; a head may keep
    a ``state`` [N, hidden] for the next."""

    slots: np.ndarray  # [N] int64
    rooms: np.ndarray  # [N] int64
    out: Tensor
    num: int = 0
    state: Tensor | None = None


class MtpDrafter:
    """Drafts are sampled with the random bits of their positions and the request's temperature and
    truncation, which maximizes their acceptance."""

    recomputes_states = True

    def __init__(
        self,
        head: DraftHead,
        sampler: Sampler,
        rules: Rules,
        kv_cache: KVCache,
        capacity: Capacity,
    ) -> None:
        self.head = head
        self._sampler = sampler
        self._rules = rules
        self.kv_cache = kv_cache
        self._coverage = MtpCoverage(capacity)

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        if len(fresh_blocks):
            blocks = torch.from_numpy(fresh_blocks).to(self.kv_cache.device)
            self.kv_cache.layers[-1].clear(blocks)  # masked entries are multiplied by 0: no NaN
        self._coverage.begin(table, plan, fresh_blocks)

    def draft(self, table: SlotTable, done: RecordedStep) -> None:
        if not done.depth:
            return
        out = self.catch_up(table, done)
        slots = done.slots[np.argsort(table.num_tokens[done.slots], kind="stable")]
        nums = rooms(table, slots, done.depth)
        slots, nums = slots[nums > 0], nums[nums > 0]
        if not len(slots):
            return
        last = torch.from_numpy(_last_tokens(table, done, slots)).to(out.device)
        drafts = Drafts(slots, nums, out.index_select(0, last))
        self.start(table, drafts)
        self._sample_draft(table, drafts)
        while drafts.num < nums.max():
            self.go_on(table, drafts)
            self._sample_draft(table, drafts)

    def catch_up(self, table: SlotTable, done: RecordedStep) -> Tensor:
        """Computes the pairs of all tokens of the step: [T, hidden]."""
        batch = done.batch
        rows = batch.rows
        slots = rows.slots[batch.token_rows]
        entries = batch.host_positions + 1
        ids = torch.from_numpy(table.ids[slots, entries]).to(done.hidden.device)
        first, last = rows.starts + 1, rows.ends
        self._coverage.note(table, rows.slots, first, last, table.num_tokens[rows.slots])
        slot_mapping = table.slot_mapping(slots, entries)
        context = make_context(
            table, rows.slots, rows.num_tokens, last + 1, slot_mapping, self.kv_cache,
            self._coverage.starts[rows.slots],
        )  # fmt: skip
        states = self.head.first_state(done.hidden)
        with forward_context(context):
            return self.head.forward(states, ids, batch.positions)

    def start(self, table: SlotTable, drafts: Drafts) -> None:
        """Prepares the first drafts: their pairs are some of the step's."""

    def go_on(self, table: SlotTable, drafts: Drafts) -> None:
        """Computes one more pair of each: the output of the last one, and the draft from it."""
        slots = drafts.slots
        entries = np.minimum(table.num_tokens[slots] + drafts.num - 1, table.max_len)
        ids = torch.from_numpy(table.ids[slots, entries]).to(drafts.out.device)
        positions = torch.from_numpy(entries - 1).to(drafts.out.device)
        ones = np.ones(len(slots), np.int64)
        slot_mapping = table.slot_mapping(slots, entries)
        context = make_context(
            table,
            slots,
            ones,
            entries + 1,
            slot_mapping,
            self.kv_cache,
            self._coverage.starts[slots],
        )
        with forward_context(context):
            drafts.out = self.head.forward(drafts.out, ids, positions)

    def _sample_draft(self, table: SlotTable, drafts: Drafts) -> None:
        """Samples one more draft of each sequence with room, unless an earlier draft is missing."""
        slots, num = drafts.slots, drafts.num
        computed, logits = self.head.logits(drafts.out)
        positions = np.minimum(table.num_tokens[slots] + num, table.max_len)
        adjusted = self._rules.adjust(logits, Places(np.arange(len(slots)), slots, positions))
        allowed = logits if adjusted is None else adjusted.logits
        random = random_rows_of(table, slots, positions, logits.device)
        tokens = self._sampler.sample(computed, allowed, random)
        if adjusted is not None:
            tokens[adjusted.waiting] = NOT_COMPILED
        is_sampled = (tokens >= 0) & (num < drafts.rooms) & (table.num_drafts[slots] == num)
        table.ids[slots[is_sampled], positions[is_sampled]] = tokens[is_sampled]
        table.num_drafts[slots[is_sampled]] += 1
        drafts.num += 1
        if table.wants_draft_logprobs[slots].any():
            drawn = torch.from_numpy(np.maximum(tokens, 0))
            found = self._sampler.logprobs(logits, drawn, 0)
            table.draft_logprobs[slots, num] = found.values[:, 0].cpu().numpy()
            table.draft_ranks[slots, num] = found.ranks.cpu().numpy()


def _last_tokens(table: SlotTable, done: RecordedStep, slots: np.ndarray) -> np.ndarray:
    """The index in T [N] of the step's token before the last known id of each slot."""
    rows = done.batch.rows
    origins = np.zeros(len(table.is_open), np.int64)  # index of position 0, if the step had it
    origins[rows.slots] = rows.token_ends - rows.ends
    found: np.ndarray = origins[slots] + table.num_tokens[slots] - 2
    return found


FIRST_ENTRY = 1  # there is no pair before the first token


class MtpCoverage:
    """The pairs in the KV cache. A slot has the ones of the places ``starts`` up to, not including,
    ``ends`` [S] int64, and attends to no earlier ones. Each block remembers if it is complete, for
    sequences that find it in the prefix cache; the head's layer sees all keys, so its blocks are of
    the first group of layers."""

    def __init__(self, capacity: Capacity) -> None:
        self.starts = np.zeros(capacity.max_num_seqs, np.int64)
        self.ends = np.zeros(capacity.max_num_seqs, np.int64)
        self._is_whole = np.zeros(capacity.num_blocks + 1, bool)  # complete blocks

    def begin(self, table: SlotTable, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        """``plan`` was applied to ``table``; ``fresh_blocks`` [N] int64 have new owners."""
        self._is_whole[fresh_blocks] = False
        for row in plan.admit:
            num_cached = row.num_cached // table.block_size
            is_lacking = np.flatnonzero(~self._is_whole[row.blocks[:num_cached]])
            num_lacking = is_lacking[-1] + 1 if len(is_lacking) else 0
            self.starts[row.slot] = max(FIRST_ENTRY, num_lacking * table.block_size)
            self.ends[row.slot] = max(FIRST_ENTRY, row.num_cached)

    def note(
        self, table: SlotTable, slots: np.ndarray, first: np.ndarray, last: np.ndarray,
        num_known: np.ndarray,
    ) -> None:  # fmt: skip
        """``slots`` [R] get the pairs of the places ``first`` to ``last`` [R]. Pairs of the
        ``num_known`` [R] known ids are final."""
        self.starts[slots] = np.where(self.ends[slots] == first, self.starts[slots], first)
        self.ends[slots] = np.minimum(last + 1, num_known)
        starts, size = self.starts[slots], table.block_size
        lows = np.maximum(first // size, np.where(starts > FIRST_ENTRY, -(-starts // size), 0))
        highs = self.ends[slots] // size
        for row in np.flatnonzero(highs > lows).tolist():
            self._is_whole[table.block_tables[0, slots[row], lows[row] : highs[row]]] = True
