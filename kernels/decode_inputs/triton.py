"""``decode_inputs``: one program per row, whose tokens are fewer than a warp's threads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_inputs.inputs import DecodeInputs
from kernels.sizes import empty_rows, next_power_of_2
from kernels.slot_state import SlotState


def launch(
    state: SlotState, slots: Tensor, depths: Tensor, width: int, block_size: int, null_block: int
) -> DecodeInputs:
    num_rows = len(slots)
    outputs = DecodeInputs(
        slots.new_empty(num_rows * width),
        slots.new_empty(num_rows * width, dtype=torch.int64),
        empty_rows(len(state.block_tables), num_rows * width, slots),
        slots.new_empty(num_rows),
        slots.new_empty(num_rows),
        slots.new_empty(num_rows * width),
        slots.new_empty(num_rows * width, dtype=torch.int64),
    )
    decode_inputs_kernel[num_rows,](
        slots, depths, state.ids, state.num_tokens, state.num_drafts, state.is_open,
        state.block_tables, *outputs, outputs.slot_mapping.stride(0), null_block * block_size,
        state.ids.shape[1], *groups_of(state), width, block_size, next_power_of_2(width),
        num_warps=1,
    )  # fmt: skip
    return outputs


def groups_of(state: SlotState) -> tuple[int, tuple[int, ...]]:
    """The number of groups, and the strides of groups and slots in the block tables."""
    return len(state.block_tables), state.block_tables.stride()[:2]


@triton.jit(do_not_specialize=["mapping_stride", "null_kv_slot"])
def decode_inputs_kernel(
    p_slots,  # [B]
    p_depths,  # [B]
    p_ids,  # [N, MAX_IDS]
    p_num_tokens,  # [N]
    p_num_drafts,  # [N]
    p_is_open,  # [N]
    p_block_tables,  # [G, N, max_blocks]
    p_input_ids,  # [B, WIDTH]
    p_positions,  # [B, WIDTH]
    p_slot_mapping,  # [G, mapping_stride]
    p_starts,  # [B]
    p_num_valid,  # [B]
    p_token_slots,  # [B, WIDTH]
    p_next_positions,  # [B, WIDTH]
    mapping_stride,
    null_kv_slot,
    MAX_IDS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TABLE_STRIDES: tl.constexpr,  # of groups and slots
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_row = tl.program_id(0)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    start = tl.load(p_num_tokens + slot) - 1
    num_drafts = tl.minimum(tl.load(p_num_drafts + slot), tl.load(p_depths + i_row))
    num_valid = tl.where(tl.load(p_is_open + slot) > 0, 1 + num_drafts, 0)
    o_w = tl.arange(0, BLOCK_W)
    is_valid = o_w < num_valid
    b_ids = tl.load(p_ids + slot * MAX_IDS + o_w, mask=is_valid, other=0)
    b_positions = tl.where(is_valid, start + o_w, start)
    o_out = i_row.to(tl.int64) * WIDTH + o_w
    tl.store(p_input_ids + o_out, b_ids, mask=o_w < WIDTH)
    tl.store(p_positions + o_out, b_positions.to(tl.int64), mask=o_w < WIDTH)
    store_kv_slots(
        p_slot_mapping + o_out, mapping_stride, p_block_tables, slot, b_positions, is_valid,
        o_w < WIDTH, null_kv_slot, NUM_GROUPS, TABLE_STRIDES, BLOCK_SIZE,
    )  # fmt: skip
    tl.store(p_starts + i_row, start)
    tl.store(p_num_valid + i_row, num_valid)
    tl.store(p_token_slots + o_out, slot.to(tl.int32), mask=o_w < WIDTH)
    tl.store(p_next_positions + o_out, b_positions.to(tl.int64) + 1, mask=o_w < WIDTH)


@triton.jit
def store_kv_slots(
    p_out,
    out_stride,  # of groups
    p_block_tables,
    slot,
    b_positions,
    is_valid,
    is_stored,
    null_kv_slot,
    NUM_GROUPS: tl.constexpr,
    TABLE_STRIDES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Stores the KV entries, int64, of ``b_positions`` of one row in each group of layers."""
    for i_group in tl.static_range(NUM_GROUPS):
        p_table = p_block_tables + i_group * TABLE_STRIDES[0] + slot * TABLE_STRIDES[1]
        b_blocks = tl.load(p_table + b_positions // BLOCK_SIZE, mask=is_valid, other=0)
        b_kv_slots = b_blocks.to(tl.int64) * BLOCK_SIZE + b_positions % BLOCK_SIZE
        b_kv_slots = tl.where(is_valid, b_kv_slots, null_kv_slot)
        tl.store(p_out + i_group * out_stride, b_kv_slots, mask=is_stored)
