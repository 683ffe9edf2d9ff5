"""The input of an MTP head for decode rows: pairs of a hidden state and the id after it.

The pair (h of q − 1, t of q) is entry q of the head's KV cache; its rotary position is that of h.
``reference.py`` computes it row by row; torch serves CPUs, Triton CUDA devices.
"""

import torch
from torch import Tensor

from kernels.decode_inputs import kv_slots_of
from kernels.dispatch import runs_triton
from kernels.mtp_inputs.pairs import Pairs
from kernels.slot_state import SlotState


def step_pairs(
    state: SlotState,
    slots: Tensor,
    starts: Tensor,
    num_valid: Tensor,
    tokens: Tensor,
    num_emitted: Tensor,
    block_size: int,
    null_block: int,
) -> Pairs:
    """The pairs of a step's tokens, after ``accept``. ``slots`` and ``num_valid`` [R] int32,
    ``starts`` [R] int32 the positions of the first tokens; ``tokens`` [R, w] int64 were sampled,
    and the first ``num_emitted`` [R] int32 of them emitted.

    Updates the range of pairs noted in the slots.
    """
    if runs_triton(slots):
        from kernels.mtp_inputs.triton import launch_step_pairs

        return launch_step_pairs(
            state, slots, starts, num_valid, tokens, num_emitted, block_size, null_block
        )
    firsts = starts + 1
    note_pairs(state, slots, firsts, num_valid)
    columns = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    is_valid = columns < num_valid[:, None]  # [R, w]
    ids = torch.where(is_valid, tokens, 0).clamp(min=0).int()
    lasts = (num_emitted - 1).clamp(min=0)
    rows = (state, slots, firsts, ids, is_valid, lasts, num_emitted)
    return _pairs(*rows, block_size, null_block)


def draft_pairs(state: SlotState, slots: Tensor, block_size: int, null_block: int) -> Pairs:
    """One pair for each of ``slots`` [R] int32 with drafts: the head's last hidden state and the
    last draft."""
    if runs_triton(slots):
        from kernels.mtp_inputs.triton import launch_draft_pairs

        return launch_draft_pairs(state, slots, block_size, null_block)
    longs = slots.long()
    nums = state.num_drafts[longs]
    ids = state.ids[longs].gather(1, nums[:, None].long())  # [R, 1]
    firsts = state.num_tokens[longs] + nums - 1
    has_drafts = ((nums > 0) & (state.is_open[longs] > 0))[:, None]
    firsts = torch.where(has_drafts[:, 0], firsts, state.num_tokens[longs])
    rows = (state, slots, firsts, ids, has_drafts, torch.zeros_like(nums), nums)
    return _pairs(*rows, block_size, null_block)


def note_pairs(state: SlotState, slots: Tensor, firsts: Tensor, nums: Tensor) -> None:
    """Notes that ``slots`` [R] int32 have ``nums`` [R] int32 pairs from the places ``firsts`` [R]
    int32 on; pairs after the known ids are dropped. Slots with 0 pairs are unchanged."""
    slots = slots.long()
    starts, ends = state.mtp_starts[slots], state.mtp_ends[slots]
    has_some = nums > 0
    state.mtp_starts[slots] = torch.where(has_some & (ends != firsts), firsts, starts)
    lasts = torch.minimum(firsts + nums, state.num_tokens[slots])
    state.mtp_ends[slots] = torch.where(has_some, lasts, ends)


def _pairs(
    state: SlotState,
    slots: Tensor,
    firsts: Tensor,
    ids: Tensor,
    is_valid: Tensor,
    lasts: Tensor,
    counts: Tensor,
    block_size: int,
    null_block: int,
) -> Pairs:
    """``ids`` and ``is_valid`` [R, w]; ``lasts`` [R] are columns of a row."""
    num_rows, width = ids.shape
    columns = torch.arange(width, dtype=torch.int32, device=ids.device)
    rows = torch.where(is_valid, firsts[:, None] + columns, firsts[:, None]).long()
    longs = slots.long()
    return Pairs(
        ids.flatten(),
        (rows - 1).flatten(),
        kv_slots_of(state, longs, rows, is_valid, block_size, null_block),
        firsts,
        state.mtp_starts[longs],
        torch.arange(num_rows, device=ids.device) * width + lasts,
        (state.num_tokens + state.num_drafts)[longs].long(),
        counts,
    )
