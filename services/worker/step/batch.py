"""A plan's rows as tensors: one flat batch of decode tokens, drafts and prompt chunks."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import prepare_attention
from kernels.sample import (
    Adjustments,
    RandomRows,
    prepare_adjustments,
    prepare_random_rows,
)
from kernels.sample.slot_params import SlotParams
from services.worker.guides.grammars import NotCompiled
from services.worker.layers.context import ForwardContext
from services.worker.machine.kv_cache import KVCache
from services.worker.metrics import GUIDE_MASK_SECONDS, GUIDE_MASKS
from services.worker.slots.logits_rules import row_change
from services.worker.slots.table import SlotTable
from shared.messages import StepPlan

MAX_WAIT_S = 0.02  # of a step that could but wait for grammars


class SamplingMetadata(NamedTuple):
    """The slots of the rows of logits, and how a token is sampled from each row."""

    slots: np.ndarray  # [S] int64
    adjustments: Adjustments | None
    waiting: np.ndarray  # [W] int64: rows from which nothing is sampled: grammars are compiled
    random: RandomRows | None


class _Place(NamedTuple):
    """A row of logits whose slot has logits rules."""

    row: int
    slot: int
    position: int  # of the token that it is for
    num_known: int  # ids of the slot; those from there to the position are drafts


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows, of which Q sample: those that have computed all they know, and may have
    more. Each samples a token after the last one it knows, and one after each of its drafts.

    Those that sample are ordered by (route, slot), as the rows of the result are.
    """

    slots: np.ndarray  # [R] int64
    num_tokens: np.ndarray  # [R] int64
    num_drafts: np.ndarray  # [R] int64, among the tokens, at the end
    num_recomputed: np.ndarray  # [R] int64, among the tokens, at the start: for their states alone
    rows: np.ndarray  # [T] int64, of each token
    token_ends: np.ndarray  # [R] int64, of the rows' tokens in T
    sampling_rows: np.ndarray  # [Q] int64, indices into R
    sampling: SamplingMetadata  # of S = sum of 1 + num_drafts of those
    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    host_positions: np.ndarray  # the same
    sampling_tokens: Tensor  # [S] int64, indices into T
    context: ForwardContext

    def kv_slots_of(self, is_chosen: np.ndarray) -> Tensor:
        """Returns the KV slots of the tokens of the sampling rows that ``is_chosen`` [Q] bool
        selects."""
        tokens = np.isin(self.rows, self.sampling_rows[is_chosen])
        return self.context.slot_mapping[torch.from_numpy(tokens)]

    @property
    def sampling_slots(self) -> np.ndarray:
        """[Q] int64"""
        slots: np.ndarray = self.slots[self.sampling_rows]
        return slots


class _Rows(NamedTuple):
    """The rows of a plan whose sequences still run; each [R] int64."""

    slots: np.ndarray
    num_tokens: np.ndarray
    num_drafts: np.ndarray
    num_recomputed: np.ndarray
    num_keys: np.ndarray


def prepare_batch(
    table: SlotTable,
    plan: StepPlan,
    kv_cache: KVCache,
    eos_ids: np.ndarray,
    recomputes_states: bool = False,
) -> Batch:
    """Lays the plan's rows whose sequences still run end to end.

    ``recomputes_states``: where the ids before the first one of a row were cached, the last of them
    is computed once more, since its hidden state is needed.
    """
    planned = _planned_rows(table, plan, recomputes_states)
    slots, num_tokens, num_drafts, num_recomputed, ends = planned
    device = kv_cache.layers[0].device
    rows = np.repeat(np.arange(len(slots)), num_tokens)  # [T]
    token_ends = np.cumsum(num_tokens)
    positions = np.arange(len(rows)) + (ends - token_ends)[rows]
    is_full = table.num_tokens[slots] >= table.end[slots]
    sampling_rows = np.flatnonzero((ends - num_drafts == table.num_tokens[slots]) & ~is_full)
    sampling_rows = sampling_rows[
        np.lexsort((slots[sampling_rows], table.routes[slots[sampling_rows]]))
    ]
    sampling_tokens = _last_tokens(token_ends[sampling_rows], 1 + num_drafts[sampling_rows])
    sampling = prepare_sampling(
        table, slots[rows[sampling_tokens]], positions[sampling_tokens] + 1, eos_ids, device
    )
    slot_mapping = table.slot_mapping(slots[rows], positions)
    is_recomputed = np.arange(len(rows)) - (token_ends - num_tokens)[rows] < num_recomputed[rows]
    slot_mapping[is_recomputed] = table.null_block * table.block_size  # it is in the cache already

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        slots,
        num_tokens,
        num_drafts,
        num_recomputed,
        rows,
        token_ends,
        sampling_rows,
        sampling,
        upload(table.ids[slots[rows], positions]),
        upload(positions),
        positions,
        upload(sampling_tokens),
        make_context(table, slots, num_tokens, ends, slot_mapping, kv_cache),
    )


def prepare_sampling(
    table: SlotTable,
    slots: np.ndarray,
    positions: np.ndarray,
    eos_ids: np.ndarray,
    device: torch.device,
) -> SamplingMetadata:
    """Prepares sampling for ``slots`` [S], whose ids before ``positions`` [S] are those of the
    table, drafts included."""

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    await_grammars(table, slots)
    rows = np.flatnonzero(table.has_logits_rules[slots])
    adjustments, waiting = prepare_logits_rules(
        *(table, rows, slots[rows], positions[rows], eos_ids, upload)
    )
    params = SlotParams(*(column[slots] for column in table.sampling))
    random = prepare_random_rows(params, positions, device)
    return SamplingMetadata(slots, adjustments, waiting, random)


def await_grammars(table: SlotTable, slots: np.ndarray) -> None:
    """Where none of ``slots`` [S] can go on since their grammars are not compiled, waits a little
    for the first of these, so that steps that bring nothing do not follow one another at once."""
    if not table.has_logits_rules[slots].all():
        return
    futures = []
    for slot in np.unique(slots).tolist():
        guide = table.guide_of(slot)
        if guide is None or guide.awaited is None:
            return
        futures.append(guide.awaited)
    wait(futures, MAX_WAIT_S, FIRST_COMPLETED)


def prepare_logits_rules(
    table: SlotTable,
    rows: np.ndarray,
    slots: np.ndarray,
    positions: np.ndarray,
    eos_ids: np.ndarray,
    upload: Callable[[np.ndarray], Tensor],
) -> tuple[Adjustments | None, np.ndarray]:
    """Returns what the logits rules of ``slots`` [n] change in ``rows`` [n] of the logits, which
    are for ``positions`` [n]; and those of the rows [W] int64 whose grammar is not compiled."""
    columns = rows, slots, positions, table.num_tokens[slots]
    places = list(map(_Place, *(each.tolist() for each in columns)))
    masks, waiting = _guide_masks(table, places)
    changes = []
    for place in places:
        row, slot, position, num_known = place
        rules = table.logits_rules[slot]
        if rules is not None and rules.has_points and row not in waiting:
            ids, prompt_len = table.ids[slot, :position], int(table.prompt_lens[slot])
            num_drafts, mask = position - num_known, masks.get(row)
            change = row_change(row, rules, ids, num_drafts, prompt_len, eos_ids, mask)
            changes.append(change)
    return prepare_adjustments(changes, masks, upload), np.array(waiting, np.int64)


def _guide_masks(table: SlotTable, places: list[_Place]) -> tuple[dict[int, np.ndarray], list[int]]:
    """Returns the masks of guides by row, and the rows that wait for their grammar."""
    masks: dict[int, np.ndarray] = {}
    waiting: list[int] = []
    started_s = time.perf_counter()
    for row, slot, position, num_known in places:
        if (guide := table.guide_of(slot)) is None:
            continue
        try:
            mask = guide.mask(table.ids[slot, num_known:position].tolist())
        except NotCompiled:
            waiting.append(row)
            continue
        if mask is not None:
            masks[row] = mask
    if masks:
        GUIDE_MASKS.inc(len(masks))
        GUIDE_MASK_SECONDS.inc(time.perf_counter() - started_s)
    return masks, waiting


def make_context(
    table: SlotTable,
    slots: np.ndarray,
    num_tokens: np.ndarray,
    num_keys: np.ndarray,
    slot_mapping: np.ndarray,
    kv_cache: KVCache,
    first_keys: np.ndarray | None = None,
) -> ForwardContext:
    """Makes the context of rows [R] in the order attention wants: one token first, then by length.
    ``slot_mapping`` [T] is of their tokens; keys before ``first_keys`` [R] are hidden."""
    cache = kv_cache.layers[0]
    return ForwardContext(
        kv_cache.layers,
        torch.from_numpy(slot_mapping).to(cache.device),
        prepare_attention(
            num_tokens,
            num_keys,
            table.block_tables[slots],
            kv_cache.block_size,
            cache.dtype,
            cache.device,
            first_keys,
        ),
    )


def _planned_rows(table: SlotTable, plan: StepPlan, recomputes_states: bool) -> _Rows:
    rows = [(row.slot, 1, row.verify_depth) for row in plan.decode]
    rows += [(row.slot, row.num_tokens, 0) for row in plan.prefill]
    slots, num_tokens, num_drafts = np.array(rows, np.int64).reshape(-1, 3).T
    is_open = table.is_open[slots]
    slots, num_tokens, num_drafts = slots[is_open], num_tokens[is_open], num_drafts[is_open]
    num_keys = table.num_computed[slots] + num_tokens
    if (num_keys > table.num_tokens[slots]).any():
        raise ValueError(f"plan {plan.step} gives a slot more tokens than it lacks")
    num_drafts = np.minimum(num_drafts, table.num_drafts[slots])
    num_recomputed = (table.lacks_state[slots] & recomputes_states).astype(np.int64)
    num_tokens, num_keys = num_tokens + num_drafts + num_recomputed, num_keys + num_drafts
    order = np.lexsort((num_keys, num_tokens > 1))
    return _Rows(
        slots[order], num_tokens[order], num_drafts[order], num_recomputed[order], num_keys[order]
    )


def _last_tokens(ends: np.ndarray, nums: np.ndarray) -> np.ndarray:
    """Returns the last ``nums`` [Q] of the tokens before ``ends`` [Q], one after the other."""
    starts = np.cumsum(nums) - nums
    tokens: np.ndarray = np.arange(int(nums.sum())) + np.repeat(ends - nums - starts, nums)
    return tokens
