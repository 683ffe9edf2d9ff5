"""A kernel for ``process_slots`` that hides tokens below the thresholds of ``finish``."""

import triton
import triton.language as tl

from kernels.sample.triton.row import COLDEST, HIDDEN, row_drawn_from


@triton.jit
def scores_kernel(
    p_adjusted,  # [S, V]
    p_changed,  # see row_drawn_from
    p_slots,  # [S]
    p_temperature,
    p_threshold,  # [S]
    p_scores,  # [S, V] →
    vocab_size,
    CHUNK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    is_token = o_token < vocab_size
    slot = tl.load(p_slots + i_row)
    temperature = tl.load(p_temperature + slot)
    threshold = tl.load(p_threshold + i_row)
    p_row = row_drawn_from(p_adjusted, p_changed, slot, i_row, vocab_size)
    scores = tl.load(p_row + o_token, is_token, HIDDEN)
    if temperature >= COLDEST:
        scores = tl.where(scores >= threshold, tl.div_rn(scores, temperature), HIDDEN)
    tl.store(p_scores + i_row * vocab_size + o_token, scores, is_token)
