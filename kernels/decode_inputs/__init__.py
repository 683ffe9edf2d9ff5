"""The input of decode rows: each row's last known id, followed by its drafts.

``reference.py`` computes it row by row; torch serves CPUs, Triton CUDA devices.
"""

import torch
from torch import Tensor

from kernels.decode_inputs.inputs import DecodeInputs
from kernels.dispatch import runs_triton
from kernels.slot_state import SlotState


def decode_inputs(
    state: SlotState, slots: Tensor, depths: Tensor, width: int, block_size: int, null_block: int
) -> DecodeInputs:
    """The inputs of ``slots`` [B] int32, with at most ``depths`` [B] int32 < ``width`` drafts each.

    Tokens beyond a row's drafts are id 0 at the position of the row's first token.
    """
    if runs_triton(slots):
        from kernels.decode_inputs.triton import launch

        return launch(state, slots, depths, width, block_size, null_block)
    slots = slots.long()
    starts = state.num_tokens[slots] - 1  # [B]
    num_drafts = torch.minimum(state.num_drafts[slots], depths)
    num_valid = torch.where(state.is_open[slots] > 0, 1 + num_drafts, 0)
    columns = torch.arange(width, dtype=torch.int32, device=slots.device)
    is_valid = columns < num_valid[:, None]  # [B, w]
    ids = torch.where(is_valid, state.ids[slots, :width], 0)
    positions = torch.where(is_valid, starts[:, None] + columns, starts[:, None]).long()
    slot_mapping = kv_slots_of(state, slots, positions, is_valid, block_size, null_block)
    return DecodeInputs(
        ids.flatten(),
        positions.flatten(),
        slot_mapping,
        starts,
        num_valid.int(),
        slots.int().repeat_interleave(width),
        positions.flatten() + 1,
    )


def kv_slots_of(
    state: SlotState,
    slots: Tensor,
    positions: Tensor,
    is_valid: Tensor,
    block_size: int,
    null_block: int,
) -> Tensor:
    """``positions`` and ``is_valid`` [R, w] of ``slots`` [R] int64 → their KV entries in each group
    of layers [G, R * w]; invalid ones are in the null block."""
    tables = state.block_tables[:, slots]  # [G, R, max_blocks]
    places = (positions // block_size).expand(len(tables), -1, -1)
    kv_slots = tables.gather(2, places) * block_size + positions % block_size
    return torch.where(is_valid, kv_slots, null_block * block_size).flatten(1)
