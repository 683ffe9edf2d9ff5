"""Appends one draft to each row's slot, where there is room.

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
    """``tokens`` [R] int64 for ``slots`` [R] int32, negative where sampling failed; ``logprobs``
    [R] float32 and ``ranks`` [R] int32 are the drafter's.

    Closed slots and rows with ``counts`` [R] int32 of 0 (nothing was emitted, or an earlier draft
    is missing) get no draft. The last position of a slot is never a draft.
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
