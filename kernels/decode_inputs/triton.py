"""``decode_inputs``: one program per row, whose tokens are fewer than a warp's threads."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.decode_inputs.inputs import DecodeInputs
from kernels.sizes import next_power_of_2
from kernels.slot_state import SlotState


def launch(
    state: SlotState, slots: Tensor, depths: Tensor, width: int, block_size: int, null_block: int
) -> DecodeInputs:
    num_rows = len(slots)
    outputs = DecodeInputs(
        slots.new_empty(num_rows * width),
        slots.new_empty(num_rows * width, dtype=torch.int64),
        slots.new_empty(num_rows * width, dtype=torch.int64),
        slots.new_empty(num_rows),
        slots.new_empty(num_rows),
        slots.new_empty(num_rows * width),
        slots.new_empty(num_rows * width, dtype=torch.int64),
    )
    decode_inputs_kernel[num_rows,](
        slots, depths, state.ids, state.num_tokens, state.num_drafts, state.is_open,
        state.block_tables, *outputs, null_block * block_size, state.ids.shape[1],
        state.block_tables.shape[1], width, block_size, next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return outputs


@triton.jit(do_not_specialize=["null_kv_slot"])
def decode_inputs_kernel(
    p_slots,  # [B]
    p_depths,  # [B]
    p_ids,  # [N, MAX_IDS]
    p_num_tokens,  # [N]
    p_num_drafts,  # [N]
    p_is_open,  # [N]
    p_block_tables,  # [N, MAX_BLOCKS]
    p_input_ids,  # [B, WIDTH]
    p_positions,  # [B, WIDTH]
    p_slot_mapping,  # [B, WIDTH]
    p_starts,  # [B]
    p_num_valid,  # [B]
    p_token_slots,  # [B, WIDTH]
    p_next_positions,  # [B, WIDTH]
    null_kv_slot,
    MAX_IDS: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
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
    p_table = p_block_tables + slot * MAX_BLOCKS
    b_slot_mapping = kv_slots_of(p_table, b_positions, is_valid, null_kv_slot, BLOCK_SIZE)
    o_out = i_row.to(tl.int64) * WIDTH + o_w
    tl.store(p_input_ids + o_out, b_ids, mask=o_w < WIDTH)
    tl.store(p_positions + o_out, b_positions.to(tl.int64), mask=o_w < WIDTH)
    tl.store(p_slot_mapping + o_out, b_slot_mapping, mask=o_w < WIDTH)
    tl.store(p_starts + i_row, start)
    tl.store(p_num_valid + i_row, num_valid)
    tl.store(p_token_slots + o_out, slot.to(tl.int32), mask=o_w < WIDTH)
    tl.store(p_next_positions + o_out, b_positions.to(tl.int64) + 1, mask=o_w < WIDTH)


@triton.jit
def kv_slots_of(p_table, b_positions, is_valid, null_kv_slot, BLOCK_SIZE: tl.constexpr):
    """KV entries of ``b_positions`` by the block table of one row, int64."""
    b_blocks = tl.load(p_table + b_positions // BLOCK_SIZE, mask=is_valid, other=0).to(tl.int64)
    b_slot_mapping = b_blocks * BLOCK_SIZE + b_positions % BLOCK_SIZE
    return tl.where(is_valid, b_slot_mapping, null_kv_slot)
