"""The third kernel draws among the surely kept tokens, and lists those in the bracket."""

import triton
import triton.language as tl

from kernels.sample.triton.bins import load_bracket
from kernels.sample.triton.row import (
    COLDEST,
    GAP,
    HIDDEN,
    NO_TOKEN,
    best_of,
    load_filters,
    load_floor,
    load_highest,
    perturbed,
    row_drawn_from,
)


@triton.jit
def gather_kernel(
    p_adjusted,  # [S, V]
    p_changed,  # see row_drawn_from
    p_slots,  # [S]
    p_positions,  # [S]
    p_filters,  # FILTERS, each [N]
    p_seeds,
    p_choices,
    p_max,  # [S, chunks]
    p_moments,  # 3, each [S, chunks]
    p_pivots,
    p_counts,
    p_masses,
    p_num_listed,  # [S]
    p_values,  # [S, LISTED]
    p_ids,  # [S, LISTED]
    p_best,  # [S, chunks], perturbed
    p_best_id,  # [S, chunks]
    p_threshold,  # [S] → the lowest kept logit, or −inf; unset for greedy rows
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIVOTS: tl.constexpr,
    LISTED: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(p_slots + i_row)
    temperature, top_k, top_p, is_searched = load_filters(p_filters, slot, vocab_size)
    if temperature >= COLDEST:
        highest = load_highest(p_max, i_row, num_chunks, CHUNKS)
        o_token = i_chunk * CHUNK + tl.arange(0, CHUNK)
        p_row = row_drawn_from(p_adjusted, p_changed, slot, i_row, vocab_size)
        values = tl.load(p_row + o_token, o_token < vocab_size, HIDDEN)
        high = load_floor(
            p_filters, p_moments, slot, i_row, num_chunks, highest, temperature, CHUNKS
        )
        if i_chunk == 0:
            tl.store(p_threshold + i_row, high)
        if is_searched:
            low, high, num_inside, _above, _mass, _total = load_bracket(
                p_pivots, p_counts, p_masses, i_row, top_k, top_p, PIVOTS
            )
            is_inside = (values >= low) & (values < high)
            num_here = tl.sum(is_inside.to(tl.int32))
            if (num_here > 0) & (num_inside <= LISTED):
                # In any order: results of the list do not depend on it.
                start = tl.atomic_add(p_num_listed + i_row, num_here, sem="relaxed")
                o_list = i_row * LISTED + start + tl.cumsum(is_inside.to(tl.int32), 0) - 1
                tl.store(p_values + o_list, values, is_inside)
                tl.store(p_ids + o_list, o_token, is_inside)
        is_drawn = (values >= high) & (values >= highest - temperature * GAP)
        best, best_id = tl.full((), HIDDEN, tl.float32), tl.full((), NO_TOKEN, tl.int32)
        if tl.max(is_drawn.to(tl.int32)) > 0:
            seed, choice = tl.load(p_seeds + slot), tl.load(p_choices + slot)
            position = tl.load(p_positions + i_row)
            best, best_id = best_of(
                perturbed(values, o_token, is_drawn, highest, temperature, seed, position, choice),
                o_token,
            )
        tl.store(p_best + i_row * num_chunks + i_chunk, best)
        tl.store(p_best_id + i_row * num_chunks + i_chunk, best_id)
