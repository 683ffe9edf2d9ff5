"""The fourth kernel finds the thresholds, draws among the kept tokens and takes the best."""

import triton
import triton.language as tl

from kernels.sample import NOT_FINITE, NOTHING_LEFT
from kernels.sample.triton.bins import load_bracket
from kernels.sample.triton.row import (
    COLDEST,
    GAP,
    HIDDEN,
    LOG2_E,
    NO_TOKEN,
    best_of,
    load_filters,
    perturbed,
    row_drawn_from,
)
from kernels.sample.triton.search import search, weigh

WRONG, EMPTY = tl.constexpr(NOT_FINITE), tl.constexpr(NOTHING_LEFT)


@triton.jit
def finish_kernel(
    p_adjusted,  # [S, V]
    p_changed,  # see row_drawn_from
    p_slots,  # [S]
    p_positions,  # [S]
    p_filters,  # FILTERS, each [N]
    p_seeds,
    p_choices,
    p_max,  # [S, chunks]
    p_max_id,  # [S, chunks]
    p_is_wrong,  # [S, chunks]
    p_pivots,
    p_counts,
    p_masses,
    p_values,  # [S, LISTED]
    p_ids,  # [S, LISTED]
    p_best,  # [S, chunks]
    p_best_id,  # [S, chunks]
    p_threshold,  # [S] → as in gather, for rows whose thresholds are searched
    p_tokens,  # [S] →
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    PIVOTS: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_row)
    temperature, top_k, top_p, is_searched = load_filters(p_filters, slot, vocab_size)
    o_chunk = tl.arange(0, CHUNKS)
    o_part = i_row * num_chunks + o_chunk
    is_chunk = o_chunk < num_chunks
    highest, token = best_of(
        tl.load(p_max + o_part, is_chunk, HIDDEN), tl.load(p_max_id + o_part, is_chunk, NO_TOKEN)
    )
    if temperature >= COLDEST:
        best, token = best_of(
            tl.load(p_best + o_part, is_chunk, HIDDEN),
            tl.load(p_best_id + o_part, is_chunk, NO_TOKEN),
        )
        if is_searched:
            low, high, num_inside, num_above, mass_above, mass_all = load_bracket(
                p_pivots, p_counts, p_masses, i_row, top_k, top_p, PIVOTS
            )
            is_listed = num_inside <= LISTED
            p_list = row_drawn_from(p_adjusted, p_changed, slot, i_row, vocab_size)
            num = vocab_size
            if is_listed:
                p_list = p_values + i_row * LISTED
                num = num_inside
            scale = LOG2_E / temperature
            threshold = low
            if top_k > 0:
                threshold = search(
                    p_list,
                    num,
                    low,
                    high,
                    num_inside,
                    top_k - num_above,
                    0.0,
                    highest,
                    scale,
                    BLOCK,
                )
            if top_p < 1:
                num_kept, mass = weigh(p_list, num, threshold, high, highest, scale, BLOCK)
                mass_all = tl.where(top_k > 0, mass_above + mass, mass_all)
                least = top_p.to(tl.float64) * mass_all.to(tl.float64) - mass_above.to(tl.float64)
                threshold = search(
                    p_list, num, threshold, high, num_kept, 0, least, highest, scale, BLOCK
                )
            seed, choice = tl.load(p_seeds + slot), tl.load(p_choices + slot)
            position = tl.load(p_positions + i_row)
            for start in range(0, num, BLOCK):
                o_list = start + tl.arange(0, BLOCK)
                values = tl.load(p_list + o_list, o_list < num, HIDDEN)
                is_drawn = (values >= threshold) & (values < high)
                is_drawn &= values >= highest - temperature * GAP
                if tl.max(is_drawn.to(tl.int32)) > 0:
                    ids = o_list
                    if is_listed:
                        ids = tl.load(p_ids + i_row * LISTED + o_list, is_drawn, NO_TOKEN)
                    here, here_id = best_of(
                        perturbed(
                            values, ids, is_drawn, highest, temperature, seed, position, choice
                        ),
                        ids,
                    )
                    is_better = (here > best) | ((here == best) & (here_id < token))
                    best = tl.where(is_better, here, best)
                    token = tl.where(is_better, here_id, token)
            tl.store(p_threshold + i_row, threshold)
    token = tl.where(highest == HIDDEN, EMPTY, token)
    is_wrong = tl.max(tl.load(p_is_wrong + o_part, is_chunk, 0)) > 0
    tl.store(p_tokens + i_row, tl.where(is_wrong, WRONG, token).to(tl.int64))
