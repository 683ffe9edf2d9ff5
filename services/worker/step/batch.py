"""A plan's rows as tensors: one flat batch of decode tokens, drafts and prompt chunks."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import prepare_attention
from services.worker.layers.context import ForwardContext
from services.worker.machine.kv_cache import KVCache
from services.worker.slots.table import SlotTable
from shared.wire.messages import StepPlan


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
    sampling_slots: np.ndarray  # [Q] int64
    logits_slots: np.ndarray  # [S] int64, S = sum of 1 + num_drafts of those
    logits_positions: np.ndarray  # [S] int64, of the tokens that are sampled
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
    recomputes_states: bool = False,
) -> Batch:
    """Lays the plan's rows whose sequences still run end to end.

    ``recomputes_states``: where the ids before the first one of a row were cached, the last of them
    is computed once more, since its hidden state is needed.
    """
    planned = _planned_rows(table, plan, recomputes_states)
    slots, num_tokens, num_drafts, num_recomputed, ends = planned
    device = kv_cache.device
    rows = np.repeat(np.arange(len(slots)), num_tokens)  # [T]
    token_slots = slots[rows]
    token_ends = np.cumsum(num_tokens)
    positions = np.arange(len(rows)) + (ends - token_ends)[rows]
    num_known = table.num_tokens[slots]
    samples = (ends - num_drafts == num_known) & (num_known < table.end[slots])
    sampling_rows = _by_route(table, slots, np.flatnonzero(samples))
    sampling_tokens = _last_tokens(token_ends[sampling_rows], 1 + num_drafts[sampling_rows])
    slot_mapping = table.slot_mapping(token_slots, positions)
    if recomputes_states:  # what is in the cache already
        is_first = np.arange(len(rows)) - (token_ends - num_tokens)[rows] < num_recomputed[rows]
        slot_mapping[is_first] = table.null_block * table.block_size

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        slots=slots,
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        num_recomputed=num_recomputed,
        rows=rows,
        token_ends=token_ends,
        sampling_rows=sampling_rows,
        sampling_slots=slots[sampling_rows],
        logits_slots=token_slots[sampling_tokens],
        logits_positions=positions[sampling_tokens] + 1,
        input_ids=upload(table.ids[token_slots, positions]),
        positions=upload(positions),
        host_positions=positions,
        sampling_tokens=upload(sampling_tokens),
        context=make_context(table, slots, num_tokens, ends, slot_mapping, kv_cache),
    )


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
    return ForwardContext(
        kv_cache.layers,
        torch.from_numpy(slot_mapping).to(kv_cache.device),
        prepare_attention(
            num_tokens,
            num_keys,
            table.block_tables[slots],
            kv_cache.block_size,
            kv_cache.dtype,
            kv_cache.device,
            first_keys,
        ),
    )


def _planned_rows(table: SlotTable, plan: StepPlan, recomputes_states: bool) -> _Rows:
    rows = [(row.slot, 1, row.verify_depth) for row in plan.decode]
    rows += [(row.slot, row.num_tokens, 0) for row in plan.prefill]
    slots, num_tokens, num_drafts = np.array(rows, np.int64).reshape(-1, 3).T
    is_open = table.is_open[slots]
    if not is_open.all():
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


def _by_route(table: SlotTable, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns ``rows`` [Q], indices into ``slots`` [R], ordered by (route, slot)."""
    if len(rows) < 2:
        return rows
    ordered: np.ndarray = rows[np.lexsort((slots[rows], table.routes[slots[rows]]))]
    return ordered


def _last_tokens(ends: np.ndarray, nums: np.ndarray) -> np.ndarray:
    """Returns the last ``nums`` [Q] of the tokens before ``ends`` [Q], one after the other."""
    starts = np.cumsum(nums) - nums
    tokens: np.ndarray = np.arange(int(nums.sum())) + np.repeat(ends - nums - starts, nums)
    return tokens
