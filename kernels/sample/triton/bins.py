"""The second kernel counts and weighs the tokens above pivots, which brackets the thresholds."""

import triton
import triton.language as tl

from kernels.sample.triton.row import (
    HIDDEN,
    LOG2_E,
    MASS_UNIT,
    load_filters,
    load_floor,
    load_highest,
    row_drawn_from,
)


@triton.jit
def bins_kernel(
    p_adjusted,  # [S, V]
    p_changed,  # see row_drawn_from
    p_slots,  # [S]
    p_filters,  # FILTERS, each [N]
    p_max,  # [S, chunks]
    p_min,  # [S, chunks]
    p_moments,  # 3, each [S, chunks]
    p_pivots,  # [S, PIVOTS], ascending; every token above the floor is ≥ the first
    p_counts,  # [S, PIVOTS]: tokens ≥ the pivot
    p_masses,  # [S, PIVOTS]
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PIVOTS: tl.constexpr,
):
    i_row, i_chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(p_slots + i_row)
    temperature, top_k, top_p, is_searched = load_filters(p_filters, slot, vocab_size)
    if is_searched:
        highest = load_highest(p_max, i_row, num_chunks, CHUNKS)
        o_part = tl.arange(0, CHUNKS)
        lowest = tl.min(
            tl.load(p_min + i_row * num_chunks + o_part, o_part < num_chunks, float("inf"))
        )
        floor = load_floor(
            p_filters, p_moments, slot, i_row, num_chunks, highest, temperature, CHUNKS
        )
        floor = tl.maximum(floor, lowest)
        # All tokens further below the highest than this weigh less than 1 - p together.
        reach = temperature * tl.log(vocab_size / tl.maximum(1 - top_p, 1e-9))
        reach = tl.where(top_k > 0, highest - floor, tl.minimum(highest - floor, reach))
        o_pivot = tl.arange(0, PIVOTS)
        share = 1 - o_pivot.to(tl.float32) / PIVOTS  # dense near the highest
        pivots = tl.maximum(highest - reach * (share * share), floor)
        pivots = tl.where(o_pivot == 0, floor, pivots)
        p_row = row_drawn_from(p_adjusted, p_changed, slot, i_row, vocab_size)
        counts = tl.zeros((PIVOTS, TILE), tl.int32)
        masses = tl.zeros((PIVOTS, TILE), tl.float32)
        for start in range(0, CHUNK, TILE):
            o_token = i_chunk * CHUNK + start + tl.arange(0, TILE)
            values = tl.load(p_row + o_token, o_token < vocab_size, HIDDEN)
            weights = tl.exp2((values - highest) * (LOG2_E / temperature))
            is_above = values[None, :] >= pivots[:, None]
            counts += is_above.to(tl.int32)
            masses += tl.where(is_above, weights[None, :], 0.0)
        units = (tl.sum(masses, 1) * MASS_UNIT).to(tl.int64)
        tl.atomic_add(p_counts + i_row * PIVOTS + o_pivot, tl.sum(counts, 1), sem="relaxed")
        tl.atomic_add(p_masses + i_row * PIVOTS + o_pivot, units, sem="relaxed")
        if i_chunk == 0:
            tl.store(p_pivots + i_row * PIVOTS + o_pivot, pivots)


@triton.jit
def _at(o_pivot, values, index):
    """values[index], 0 after the end."""
    return tl.sum(tl.where(o_pivot == index, values, 0))


@triton.jit
def load_bracket(p_pivots, p_counts, p_masses, row, top_k, top_p, PIVOTS: tl.constexpr):
    """The bracket [low, high) of both thresholds → low, high, the number of tokens inside it and
    above it, the mass above it, and the mass of all tokens above the floor.

    The number of tokens top_k keeps, and so the mass of top_p, is known only within bounds.
    """
    o_pivot = tl.arange(0, PIVOTS)
    pivots = tl.load(p_pivots + row * PIVOTS + o_pivot)
    counts = tl.load(p_counts + row * PIVOTS + o_pivot)
    masses = tl.load(p_masses + row * PIVOTS + o_pivot)
    low = tl.max(tl.where((counts >= top_k) & (top_k > 0), o_pivot, 0))
    high = tl.where(top_k > 0, low + 1, 0)
    if top_p < 1:
        share = top_p.to(tl.float64)
        most = share * _at(o_pivot, masses, low).to(tl.float64)
        least = share * _at(o_pivot, masses, high).to(tl.float64)
        is_below = masses.to(tl.float64) < least
        high = tl.maximum(high, tl.min(tl.where(is_below, o_pivot, PIVOTS)))
        is_enough = masses.to(tl.float64) >= most
        low = tl.where(top_k > 0, low, tl.max(tl.where(is_enough, o_pivot, 0)))
    num_above = _at(o_pivot, counts, high)
    top = tl.where(high == PIVOTS, float("inf"), _at(o_pivot, pivots, high))
    num_inside = _at(o_pivot, counts, low) - num_above
    mass_above = _at(o_pivot, masses, high)
    bottom = _at(o_pivot, pivots, low)
    return bottom, top, num_inside, num_above, mass_above, _at(o_pivot, masses, 0)
