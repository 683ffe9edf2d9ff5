"""Puts one draft more of each row into its slot, where there is room.

``reference.py`` does it row by row; torch serves CPUs, Triton CUDA devices.
"""

from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.slot_state import SlotState


def store_drafts(
    state: SlotState,
    slots: Tensor,
    counts: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    ranks: Tensor,
) -> None:
    """``tokens`` [R] int64 for ``slots`` [R] int32, below 0 where none could be drawn, each with
    what its drafter thinks of it: ``logprobs`` [R] float32 and ``ranks`` [R] int32.

    Slots that are closed or have no ``counts`` [R] int32 get none: nothing was emitted, or there is
    no draft before this one. What follows the drafts has to be a token too.
    """
    if runs_triton(slots):
        from kernels.store_drafts.triton import launch

        launch(state, slots, counts, tokens, logprobs, ranks)
        return
    slots = slots.long()
    columns = state.num_drafts[slots].long()
    last = state.max_drafts - 1
    rooms = (state.ends[slots] - state.num_tokens[slots] - 1).clamp(max=last + 1)
    is_stored = (tokens >= 0) & (columns < rooms) & (state.is_open[slots] > 0) & (counts > 0)
    columns = columns.clamp(max=last)
    for target, column, values in (
        (state.ids, 1 + columns, tokens),
        (state.draft_logprobs, columns, logprobs),
        (state.draft_ranks, columns, ranks),
    ):
        before = target[slots, column]
        target[slots, column] = values.to(target.dtype).where(is_stored, before)
    state.num_drafts[slots] += is_stored.int()
