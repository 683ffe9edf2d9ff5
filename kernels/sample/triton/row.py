"""Constants, and functions over a row that several kernels use."""

import triton
import triton.language as tl

from kernels.random_bits import PURPOSE_SAMPLE
from kernels.random_bits.triton import random_bits
from kernels.sample.gumbel import MAX_GAP
from kernels.sample.rows import MIN_TEMPERATURE

HIDDEN = tl.constexpr(float("-inf"))
NO_TOKEN = tl.constexpr(2**31 - 1)
GAP = tl.constexpr(MAX_GAP)
COLDEST = tl.constexpr(MIN_TEMPERATURE)
PURPOSE = tl.constexpr(PURPOSE_SAMPLE)
LOG2_E = tl.constexpr(1.4426950408889634)
MASS_UNIT = tl.constexpr(2.0**40)


@triton.jit
def load_filters(p_filters, slot, vocab_size):
    """→ temperature, top_k (0: none), top_p, True if thresholds must be searched."""
    p_temperature, p_top_k, p_top_p, _, _ = p_filters
    temperature = tl.load(p_temperature + slot)
    top_k = tl.load(p_top_k + slot)
    top_p = tl.load(p_top_p + slot)
    top_k = tl.where(top_k < vocab_size, top_k, 0)
    is_searched = (temperature >= COLDEST) & ((top_k > 0) | (top_p < 1))
    return temperature, top_k, top_p, is_searched


@triton.jit
def row_drawn_from(p_adjusted, p_changed, slot, row, vocab_size):
    """Pointer to the row to sample from. ``p_changed`` is None, or logits [S, V] and a flag by slot
    that selects them."""
    p_row = p_adjusted + row * vocab_size
    if p_changed is not None:
        p_logits, p_is_changed = p_changed
        if tl.load(p_is_changed + slot) > 0:
            p_row = p_logits + row * vocab_size
    return p_row


@triton.jit
def load_highest(p_max, row, num_chunks, CHUNKS: tl.constexpr):
    o_chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(p_max + row * num_chunks + o_chunk, o_chunk < num_chunks, HIDDEN))


@triton.jit
def load_floor(
    p_filters, p_moments, slot, row, num_chunks, highest, temperature, CHUNKS: tl.constexpr
):
    """→ a lower bound of the logits kept by top_n_sigma and min_p."""
    _, _, _, p_min_p, p_top_n_sigma = p_filters
    min_p, top_n_sigma = tl.load(p_min_p + slot), tl.load(p_top_n_sigma + slot)
    gap = temperature * tl.log(tl.maximum(min_p, 1e-37))
    floor = tl.where(min_p > 0, highest + gap, HIDDEN)
    if top_n_sigma > 0:
        deviation = _load_deviation(p_moments, row, num_chunks, CHUNKS)
        floor = tl.maximum(floor, highest - top_n_sigma * deviation)
    return floor


@triton.jit
def store_moments(p_moments, o_part, values):
    """Of a chunk: the number of visible logits, their mean, and the sum of squared deviations."""
    p_num, p_mean, p_squares = p_moments
    is_counted = values > HIDDEN
    num = tl.sum(is_counted.to(tl.float32))
    mean = tl.sum(tl.where(is_counted, values, 0.0)) / tl.maximum(num, 1.0)
    gap = tl.where(is_counted, values - mean, 0.0)
    tl.store(p_num + o_part, num)
    tl.store(p_mean + o_part, mean)
    tl.store(p_squares + o_part, tl.sum(gap * gap))


@triton.jit
def _load_deviation(p_moments, row, num_chunks, CHUNKS: tl.constexpr):
    """The standard deviation of a row's visible logits, from the moments of its chunks."""
    p_num, p_mean, p_squares = p_moments
    o_chunk = tl.arange(0, CHUNKS)
    o_part, is_chunk = row * num_chunks + o_chunk, o_chunk < num_chunks
    num = tl.load(p_num + o_part, is_chunk, 0.0)
    mean = tl.load(p_mean + o_part, is_chunk, 0.0)
    squares = tl.load(p_squares + o_part, is_chunk, 0.0)
    total = tl.maximum(tl.sum(num), 1.0)
    gap = mean - tl.sum(num * mean) / total
    return tl.sqrt(tl.sum(squares + num * gap * gap) / total)


@triton.jit
def best_of(scores, ids):
    """The highest score and the lowest id that has it."""
    best = tl.max(scores)
    return best, tl.min(tl.where(scores == best, ids, NO_TOKEN))


@triton.jit
def perturbed(values, ids, is_kept, highest, temperature, seed, position, choice):
    """Scores relative to the highest plus noise; −inf if not kept."""
    bits = random_bits(seed, ids, position, choice, PURPOSE)
    uniform = tl.maximum((bits >> 8).to(tl.int32).to(tl.float32), 0.5) * 5.9604644775390625e-08
    noise = -tl.log(-tl.log(uniform))
    return tl.where(is_kept, (values - highest) / temperature + noise, HIDDEN)
