"""``store_drafts``: one program of one warp per row, as in ``accept``."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.slot_state import SlotState


def launch(
    state: SlotState,
    slots: Tensor,
    counts: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
    ranks: Tensor,
) -> None:
    store_drafts_kernel[len(slots),](
        slots, counts, tokens, logprobs, ranks, state.ids, state.num_tokens, state.num_drafts,
        state.ends, state.is_open, state.draft_logprobs, state.draft_ranks, tokens.stride(0),
        logprobs.stride(0), state.max_drafts, state.draft_ranks.shape[1], num_warps=1,
    )  # fmt: skip


@triton.jit
def store_drafts_kernel(
    p_slots,  # [R]
    p_counts,  # [R]
    p_tokens,  # [R]
    p_logprobs,  # [R]
    p_ranks,  # [R]
    p_ids,  # [N, 1 + MAX_DRAFTS]
    p_num_tokens,  # [N]
    p_num_drafts,  # [N]
    p_ends,  # [N]
    p_is_open,  # [N]
    p_draft_logprobs,  # [N, LOGPROBS]
    p_draft_ranks,  # [N, LOGPROBS]
    token_stride,
    logprob_stride,
    MAX_DRAFTS: tl.constexpr,
    LOGPROBS: tl.constexpr,
):
    i_row = tl.program_id(0)
    slot = tl.load(p_slots + i_row).to(tl.int64)
    count = tl.load(p_counts + i_row)
    token = tl.load(p_tokens + i_row.to(tl.int64) * token_stride)
    logprob = tl.load(p_logprobs + i_row * logprob_stride)
    rank = tl.load(p_ranks + i_row)
    column = tl.load(p_num_drafts + slot)
    room = tl.load(p_ends + slot) - tl.load(p_num_tokens + slot) - 1
    is_open = tl.load(p_is_open + slot) > 0
    is_stored = (token >= 0) & (column < tl.minimum(room, MAX_DRAFTS)) & is_open & (count > 0)
    # Several programs may have the null slot, which gets no draft.
    tl.store(p_ids + slot * (1 + MAX_DRAFTS) + 1 + column, token.to(tl.int32), mask=is_stored)
    tl.store(p_draft_logprobs + slot * LOGPROBS + column, logprob, mask=is_stored)
    tl.store(p_draft_ranks + slot * LOGPROBS + column, rank, mask=is_stored)
    tl.store(p_num_drafts + slot, column + 1, mask=is_stored)
