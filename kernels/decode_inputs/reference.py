"""Reference of ``decode_inputs``: row by row, token by token."""

import torch
from torch import Tensor

from kernels.decode_inputs.inputs import DecodeInputs
from kernels.slot_state import SlotState


def decode_inputs(
    state: SlotState, slots: Tensor, depths: Tensor, width: int, block_size: int, null_block: int
) -> DecodeInputs:
    ids, positions, slot_mapping, starts, nums = [], [], [], [], []
    for slot, depth in zip(slots.tolist(), depths.tolist(), strict=True):
        start = int(state.num_tokens[slot]) - 1
        num = 1 + min(int(state.num_drafts[slot]), depth) if state.is_open[slot] else 0
        starts.append(start)
        nums.append(num)
        for column in range(width):
            is_valid = column < num
            position = start + column if is_valid else start
            blocks = state.block_tables[:, slot, position // block_size]
            ids.append(int(state.ids[slot, column]) if is_valid else 0)
            positions.append(position)
            kv_slots = blocks.long() * block_size + position % block_size
            nowhere = torch.full_like(kv_slots, null_block * block_size)
            slot_mapping.append(kv_slots if is_valid else nowhere)
    return DecodeInputs(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(positions),
        torch.stack(slot_mapping, 1),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(nums, dtype=torch.int32),
        torch.tensor([slot for slot in slots.tolist() for _ in range(width)], dtype=torch.int32),
        torch.tensor(positions) + 1,
    )
