"""A plan's rows as tensors: one flat batch of decode tokens and prompt chunks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import prepare_attention
from kernels.sample import Adjustments, RandomRows, prepare_adjustments, prepare_random_rows
from services.worker.adjustments import row_change
from services.worker.context import ForwardContext
from services.worker.kv_cache import KVCache
from services.worker.slots import SlotTable
from shared.messages import StepPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of R rows, of which S sample a token: those that have computed all they know, and
    may have more.

    Those that sample are ordered by (route, slot), as the rows of the result are.
    """

    slots: np.ndarray  # [R] int64
    num_tokens: np.ndarray  # [R] int64
    sampling_slots: np.ndarray  # [S] int64
    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64
    sampling_tokens: Tensor  # [S] int64, indices into T
    adjustments: Adjustments | None
    random: RandomRows | None
    context: ForwardContext


def prepare_batch(
    table: SlotTable, plan: StepPlan, kv_cache: KVCache, eos_ids: np.ndarray
) -> Batch:
    """The batch of the plan's rows whose sequences still run."""
    slots, num_tokens = _planned_rows(table, plan)
    ends = table.num_computed[slots] + num_tokens
    device = kv_cache.layers[0].device
    rows = np.repeat(np.arange(len(slots)), num_tokens)  # [T]
    token_ends = np.cumsum(num_tokens)
    positions = np.arange(len(rows)) + (ends - token_ends)[rows]
    is_full = table.num_tokens[slots] >= table.end[slots]
    sampling_rows = np.flatnonzero((ends == table.num_tokens[slots]) & ~is_full)
    sampling_rows = sampling_rows[
        np.lexsort((slots[sampling_rows], table.routes[slots[sampling_rows]]))
    ]
    sampling_slots = slots[sampling_rows]

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        slots,
        num_tokens,
        sampling_slots,
        upload(table.ids[slots[rows], positions]),
        upload(positions),
        upload(token_ends[sampling_rows] - 1),
        _adjustments(table, sampling_slots, eos_ids, device),
        _random_rows(table, sampling_slots, device),
        _context(table, slots, num_tokens, slots[rows], positions, kv_cache),
    )


def _planned_rows(table: SlotTable, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """Slots and token counts in the order attention wants: one token first, then by length."""
    rows = [(row.slot, 1) for row in plan.decode]
    rows += [(row.slot, row.num_tokens) for row in plan.prefill]
    slots, num_tokens = np.array(rows, np.int64).reshape(-1, 2).T
    is_open = table.is_open[slots]
    slots, num_tokens = slots[is_open], num_tokens[is_open]
    num_keys = table.num_computed[slots] + num_tokens
    if (num_keys > table.num_tokens[slots]).any():
        raise ValueError(f"plan {plan.step} gives a slot more tokens than it lacks")
    order = np.lexsort((num_keys, num_tokens > 1))
    return slots[order], num_tokens[order]


def _context(
    table: SlotTable,
    slots: np.ndarray,
    num_tokens: np.ndarray,
    token_slots: np.ndarray,
    positions: np.ndarray,
    kv_cache: KVCache,
) -> ForwardContext:
    dtype, device = kv_cache.layers[0].dtype, kv_cache.layers[0].device
    block_size = kv_cache.block_size
    blocks = table.block_tables[token_slots, positions // block_size]
    num_keys = table.num_computed[slots] + num_tokens
    block_tables = table.block_tables[slots]
    return ForwardContext(
        kv_cache.layers,
        torch.from_numpy(blocks * block_size + positions % block_size).to(device),
        prepare_attention(num_tokens, num_keys, block_tables, block_size, dtype, device),
    )


def _adjustments(
    table: SlotTable, slots: np.ndarray, eos_ids: np.ndarray, device: torch.device
) -> Adjustments | None:
    changes = []
    for row in np.flatnonzero(table.has_wishes[slots]).tolist():
        slot = slots[row]
        ids = table.ids[slot, : table.num_tokens[slot]]
        if (wishes := table.wishes[slot]) is not None:
            changes.append(row_change(row, wishes, ids, table.prompt_lens[slot], eos_ids))
    return prepare_adjustments(changes, device)


def _random_rows(table: SlotTable, slots: np.ndarray, device: torch.device) -> RandomRows | None:
    return prepare_random_rows(
        table.temperature[slots],
        table.top_k[slots],
        table.top_p[slots],
        table.min_p[slots],
        table.seeds[slots],
        table.num_tokens[slots],
        table.choices[slots],
        device,
    )
