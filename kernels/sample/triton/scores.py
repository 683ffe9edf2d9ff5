"""A kernel for ``process_slots``, which hides what the thresholds of ``finish`` do not keep."""

import triton
import triton.language as tl

from kernels.sample.triton.row import COLDEST, HIDDEN


@triton.jit
def scores_kernel(
    p_adjusted,  # [S, V]
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
    temperature = tl.load(p_temperature + tl.load(p_slots + i_row))
    threshold = tl.load(p_threshold + i_row)
    scores = tl.load(p_adjusted + i_row * vocab_size + o_token, is_token, HIDDEN)
    if temperature >= COLDEST:
        scores = tl.where(scores >= threshold, tl.div_rn(scores, temperature), HIDDEN)
    tl.store(p_scores + i_row * vocab_size + o_token, scores, is_token)
