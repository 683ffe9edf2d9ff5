"""``mtp_inputs``: one program of one warp per row, as in ``accept``."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_inputs.triton import groups_of, store_kv_slots
from kernels.mtp_inputs.pairs import Pairs
from kernels.sizes import empty_rows, next_power_of_2
from kernels.slot_state import SlotState


def launch_step_pairs(
    state: SlotState,
    slots: Tensor,
    starts: Tensor,
    num_valid: Tensor,
    tokens: Tensor,
    num_emitted: Tensor,
    block_size: int,
    null_block: int,
) -> Pairs:
    width = tokens.shape[1]
    pairs = _empty_pairs(state, slots, width, num_emitted)
    step_pairs_kernel[len(slots),](
        slots, starts, num_valid, tokens, state.num_tokens, state.block_tables, state.mtp_starts,
        state.mtp_ends, *pairs, *tokens.stride(), pairs.slot_mapping.stride(0),
        null_block * block_size, *groups_of(state), width, block_size, next_power_of_2(width),
        num_warps=1,
    )  # fmt: skip
    return pairs


def launch_draft_pairs(state: SlotState, slots: Tensor, block_size: int, null_block: int) -> Pairs:
    pairs = _empty_pairs(state, slots, 1, torch.empty_like(slots))
    draft_pairs_kernel[len(slots),](
        slots, state.ids, state.num_tokens, state.num_drafts, state.is_open, state.block_tables,
        state.mtp_starts, *pairs, pairs.slot_mapping.stride(0), null_block * block_size,
        state.ids.shape[1], *groups_of(state), block_size, num_warps=1,
    )  # fmt: skip
    return pairs


def _empty_pairs(state: SlotState, slots: Tensor, width: int, counts: Tensor) -> Pairs:
    num_rows = len(slots)
    return Pairs(
        slots.new_empty(num_rows * width),
        slots.new_empty(num_rows * width, dtype=torch.int64),
        empty_rows(len(state.block_tables), num_rows * width, slots),
        slots.new_empty(num_rows),
        slots.new_empty(num_rows),
        slots.new_empty(num_rows, dtype=torch.int64),
        slots.new_empty(num_rows, dtype=torch.int64),
        counts,
    )


@triton.jit(do_not_specialize=["mapping_stride", "null_kv_slot"])
def step_pairs_kernel(
    p_slots,  # [R]
    p_starts,  # [R]
    p_num_valid,  # [R]
    p_tokens,  # [R, WIDTH]
    p_num_tokens,  # [N]
    p_block_tables,  # [G, N, max_blocks]
    p_mtp_starts,  # [N]
    p_mtp_ends,  # [N]
    p_input_ids,  # [R, WIDTH]
    p_positions,  # [R, WIDTH]
    p_slot_mapping,  # [G, mapping_stride]
    p_firsts,  # [R]
    p_first_keys,  # [R]
    p_lasts,  # [R]
    p_targets,  # [R]
    p_num_emitted,  # [R]
    token_stride,
    token_step,
    mapping_stride,
    null_kv_slot,
    NUM_GROUPS: tl.constexpr,
    TABLE_STRIDES: tl.constexpr,  # of groups and slots
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    first = tl.load(p_starts + i_row) + 1
    num_valid = tl.load(p_num_valid + i_row)
    o_w = tl.arange(0, BLOCK_W)
    is_valid = o_w < num_valid
    b_tokens = tl.load(p_tokens + i_row * token_stride + o_w * token_step, mask=is_valid, other=0)
    mtp_start, mtp_end = tl.load(p_mtp_starts + slot), tl.load(p_mtp_ends + slot)
    num_tokens = tl.load(p_num_tokens + slot)
    b_rows = tl.where(is_valid, first + o_w, first)
    mtp_start = tl.where((num_valid > 0) & (mtp_end != first), first, mtp_start)
    o_out = i_row * WIDTH + o_w
    tl.store(p_input_ids + o_out, tl.maximum(b_tokens, 0).to(tl.int32), mask=o_w < WIDTH)
    tl.store(p_positions + o_out, (b_rows - 1).to(tl.int64), mask=o_w < WIDTH)
    store_kv_slots(
        p_slot_mapping + o_out, mapping_stride, p_block_tables, slot, b_rows, is_valid,
        o_w < WIDTH, null_kv_slot, NUM_GROUPS, TABLE_STRIDES, BLOCK_SIZE,
    )  # fmt: skip
    tl.store(p_firsts + i_row, first)
    tl.store(p_first_keys + i_row, mtp_start)
    last = tl.maximum(tl.load(p_num_emitted + i_row) - 1, 0)
    tl.store(p_lasts + i_row, i_row * WIDTH + last)
    tl.store(p_targets + i_row, num_tokens.to(tl.int64))  # all drafts are consumed
    # Several programs may have the null slot, which gets no pairs.
    tl.store(p_mtp_starts + slot, mtp_start, mask=num_valid > 0)
    tl.store(p_mtp_ends + slot, tl.minimum(first + num_valid, num_tokens), mask=num_valid > 0)


@triton.jit(do_not_specialize=["mapping_stride", "null_kv_slot"])
def draft_pairs_kernel(
    p_slots,  # [R]
    p_ids,  # [N, MAX_IDS]
    p_num_tokens,  # [N]
    p_num_drafts,  # [N]
    p_is_open,  # [N]
    p_block_tables,  # [G, N, max_blocks]
    p_mtp_starts,  # [N]
    p_input_ids,  # [R]
    p_positions,  # [R]
    p_slot_mapping,  # [G, mapping_stride]
    p_firsts,  # [R]
    p_first_keys,  # [R]
    p_lasts,  # [R]
    p_targets,  # [R]
    p_counts,  # [R]
    mapping_stride,
    null_kv_slot,
    MAX_IDS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TABLE_STRIDES: tl.constexpr,  # of groups and slots
    BLOCK_SIZE: tl.constexpr,
):
    i_row = tl.program_id(0)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    num_tokens, num_drafts = tl.load(p_num_tokens + slot), tl.load(p_num_drafts + slot)
    has_drafts = (num_drafts > 0) & (tl.load(p_is_open + slot) > 0)
    first_key = tl.load(p_mtp_starts + slot)
    token = tl.load(p_ids + slot * MAX_IDS + num_drafts)
    first = tl.where(has_drafts, num_tokens + num_drafts - 1, num_tokens)
    tl.store(p_input_ids + i_row, token)
    tl.store(p_positions + i_row, (first - 1).to(tl.int64))
    store_kv_slots(
        p_slot_mapping + i_row, mapping_stride, p_block_tables, slot, first, has_drafts, None,
        null_kv_slot, NUM_GROUPS, TABLE_STRIDES, BLOCK_SIZE,
    )  # fmt: skip
    tl.store(p_firsts + i_row, first)
    tl.store(p_first_keys + i_row, first_key)
    tl.store(p_lasts + i_row, i_row.to(tl.int64))
    tl.store(p_targets + i_row, (num_tokens + num_drafts).to(tl.int64))
    tl.store(p_counts + i_row, num_drafts)
