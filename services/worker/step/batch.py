"""A plan's rows as tensors of the host: decodes, drafts and prompt chunks in one flat batch."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kernels.delta.states import States
from kernels.paged_attention import prepare_attention
from services.worker.layers.context import AttentionInputs, ForwardContext
from services.worker.machine.kv_cache import KVCache
from services.worker.machine.state_pool import StatePool
from services.worker.slots.table import SlotTable
from services.worker.step.rows import Rows, by_route, plan_rows
from shared.wire.messages import StepPlan


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of ``rows``. Sampling rows are ordered by (route, slot), like rows of the result."""

    rows: Rows
    token_rows: np.ndarray  # [T] int64
    logits_slots: np.ndarray  # [S] int64; S is the sum of 1 + num_drafts of sampling rows
    logits_positions: np.ndarray  # [S] int64, of the sampled tokens
    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int64, of rotations
    host_positions: np.ndarray  # [T] int64
    sampling_tokens: Tensor  # [S] int64, indices into T
    context: ForwardContext
    embeddings: Tensor | None = None  # [n, T, hidden]: in place of ids, or [n, T, 1] with states

    def kv_slots_of(self, is_chosen: np.ndarray) -> list[Tensor]:
        """Returns the KV slots, in each group, of all tokens of the sampling rows in ``is_chosen``
        [Q] bool."""
        tokens = np.isin(self.token_rows, self.rows.sampling_rows[is_chosen])
        is_token = torch.from_numpy(tokens)
        return [each.slot_mapping[is_token] for each in self.context.groups]


def prepare_batch(
    table: SlotTable,
    plan: StepPlan,
    kv_cache: KVCache,
    states: StatePool,
    recomputes_states: bool = False,
) -> Batch:
    """Concatenates the plan's rows with open slots; see ``plan_rows``. The step must run, since
    ``states`` count its tokens."""
    planned = plan_rows(table, table, plan, recomputes_states, _attention_order)
    sampling = planned.sampling_rows
    if len(sampling) > 1:
        ordered = sampling[by_route(table, planned.sampling_slots)]
        planned = planned._replace(sampling_rows=ordered)
        sampling = ordered
    slots, num_tokens, token_ends = planned.slots, planned.num_tokens, planned.token_ends
    device = kv_cache.device
    rows = np.repeat(np.arange(len(slots)), num_tokens)  # [T]
    token_slots = slots[rows]
    positions = np.arange(len(rows)) + (planned.ends - token_ends)[rows]
    sampling_tokens = _last_tokens(token_ends[sampling], 1 + planned.num_drafts[sampling])
    slot_mapping = table.slot_mapping(token_slots, positions)
    if recomputes_states:  # recomputed tokens have their KV in the cache
        offsets = np.arange(len(rows)) - (token_ends - num_tokens)[rows]
        is_cached = offsets < planned.num_recomputed[rows]
        slot_mapping[:, is_cached] = table.null_block * table.block_size

    context = make_context(table, slots, num_tokens, planned.ends, slot_mapping, kv_cache)
    of_states = states.rows(slots, planned.starts, num_tokens, planned.num_drafts)
    if of_states is not None:
        context = replace(context, states=States(states.layers, of_states))

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        rows=planned,
        token_rows=rows,
        logits_slots=token_slots[sampling_tokens],
        logits_positions=positions[sampling_tokens] + 1,
        input_ids=upload(table.ids[token_slots, positions]),
        positions=upload(positions),
        host_positions=positions,
        sampling_tokens=upload(sampling_tokens),
        context=context,
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
    """Makes the context of R rows in the order of attention: one-token rows first, then by number
    of keys. ``slot_mapping`` [groups, T] covers their tokens; keys before ``first_keys`` [R] are
    hidden."""
    first, *others = table.block_tables.take(slots, axis=1)
    attention = prepare_attention(
        num_tokens=num_tokens,
        num_keys=num_keys,
        block_tables=first,
        block_size=kv_cache.block_size,
        dtype=kv_cache.dtype,
        device=kv_cache.device,
        first_keys=first_keys,
    )
    places = [torch.from_numpy(each).to(kv_cache.device) for each in slot_mapping]
    batches = [attention, *(attention.with_tables(each) for each in others)]
    return ForwardContext(kv_cache.layers, list(map(AttentionInputs, places, batches)))


def _attention_order(slots: np.ndarray, num_tokens: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
    """One-token rows first, then by number of keys."""
    order: np.ndarray = np.lexsort((num_keys, num_tokens > 1))
    return order


def _last_tokens(ends: np.ndarray, nums: np.ndarray) -> np.ndarray:
    """Returns the indices of the last ``nums`` [Q] tokens before ``ends`` [Q], concatenated."""
    starts = np.cumsum(nums) - nums
    tokens: np.ndarray = np.arange(int(nums.sum())) + np.repeat(ends - nums - starts, nums)
    return tokens
