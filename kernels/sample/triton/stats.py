"""The first kernel finds the highest and lowest logits of each chunk of a row, and its moments."""

import triton
import triton.language as tl

from kernels.sample.triton.row import HIDDEN, best_of, row_drawn_from, store_moments


@triton.jit
def stats_kernel(
    p_logits,  # [S, num_logits]
    p_adjusted,  # [S, V]
    p_changed,  # see row_drawn_from
    p_slots,  # [S]
    p_filters,  # FILTERS, each [N]
    p_max,  # [S, chunks]
    p_max_id,  # [S, chunks]
    p_min,  # [S, chunks]: lowest finite logit
    p_is_wrong,  # [S, chunks]
    p_moments,  # 3, each [S, chunks]; for rows with top_n_sigma
    p_counts,  # [S, PIVOTS]
    p_masses,  # [S, PIVOTS]
    p_num_listed,  # [S]
    vocab_size,
    num_logits,
    IS_ADJUSTED: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
    is_token = o_token < vocab_size
    logits = tl.load(p_logits + i_row * num_logits + o_token, o_token < num_logits, 0.0)
    is_finite = tl.abs(logits) < float("inf")  # False for NaN
    values = tl.where(is_token, logits, HIDDEN)
    slot = tl.load(p_slots + i_row)
    if IS_ADJUSTED:
        p_row = row_drawn_from(p_adjusted, p_changed, slot, i_row, vocab_size)
        values = tl.load(p_row + o_token, is_token, HIDDEN)
    best, best_id = best_of(values, o_token)
    o_part = i_row * tl.num_programs(1) + i_chunk
    tl.store(p_max + o_part, best)
    tl.store(p_max_id + o_part, best_id)
    tl.store(p_min + o_part, tl.min(tl.where(values > HIDDEN, values, float("inf"))))
    tl.store(p_is_wrong + o_part, 1 - tl.min(is_finite.to(tl.int32)))
    _, _, _, _, p_top_n_sigma = p_filters
    if tl.load(p_top_n_sigma + slot) > 0:
        store_moments(p_moments, o_part, values)
    if i_chunk == 0:
        o_pivot = tl.arange(0, PIVOTS)
        tl.store(p_counts + i_row * PIVOTS + o_pivot, tl.zeros((PIVOTS,), tl.int32))
        tl.store(p_masses + i_row * PIVOTS + o_pivot, tl.zeros((PIVOTS,), tl.int64))
        tl.store(p_num_listed + i_row, 0)
