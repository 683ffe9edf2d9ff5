"""Puts the next draft of each row into its slot, where it has room and lacks none before it.

``reference.py`` says it row by row; torch serves CPUs, Triton CUDA devices.
"""

import torch
from torch import Tensor

from kernels.slot_state import SlotState


def store_drafts(
    state: SlotState, slots: Tensor, num_emitted: Tensor, tokens: Tensor, index: int, depth: int
) -> None:
    """``tokens`` [R] int64 are the drafts number ``index`` (from 0) of ``slots`` [R] int32, below 0
    where none could be drawn; each may have ``depth``, and what follows them has to be a token too.
    Slots that emitted nothing (``num_emitted`` [R] int32) or are closed get none.
    """
    slots = slots.long()
    rooms = (state.ends[slots] - state.num_tokens[slots] - 1).clamp(max=depth)
    is_stored = (
        (tokens >= 0)
        & (index < rooms)
        & (state.num_drafts[slots] == index)
        & (state.is_open[slots] > 0)
        & (num_emitted > 0)
    )
    state.ids[slots, 1 + index] = torch.where(is_stored, tokens.int(), state.ids[slots, 1 + index])
    state.num_drafts[slots] = state.num_drafts[slots] + is_stored.int()
