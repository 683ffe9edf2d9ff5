"""Searches the values of a bracket for a threshold."""

import triton
import triton.language as tl

from kernels.sample.triton.row import HIDDEN, MASS_UNIT


@triton.jit
def _key(value):
    """int64 in the order of float32, so that bisection ends for all values."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weigh(p_values, num, low, high, highest, scale, BLOCK: tl.constexpr):
    """The number and the mass of the listed values in [low, high)."""
    count, mass = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    for start in range(0, num, BLOCK):
        o_list = start + tl.arange(0, BLOCK)
        values = tl.load(p_values + o_list, o_list < num, HIDDEN)
        is_inside = (values >= low) & (values < high)
        units = (tl.exp2((values - highest) * scale) * MASS_UNIT).to(tl.int64)
        count += tl.sum(is_inside.to(tl.int32))
        mass += tl.sum(tl.where(is_inside, units, 0))
    return count, mass


@triton.jit
def search(
    p_values, num, low, high, num_low, top_k, least_mass, highest, scale, BLOCK: tl.constexpr
):
    """The highest value in [low, high) with at least ``top_k`` listed tokens at or above it, or if
    that is 0 with at least ``least_mass``; ``num_low`` tokens are ≥ low. Any value with the same
    kept tokens is valid."""
    bottom, top, num_top = _key(low), tl.minimum(_key(high), _key(highest) + 1), 0
    is_by_value = True
    while (top - bottom > 1) & (num_low - num_top > 1) & (num_low > top_k):
        # Bisecting values is fast, bisecting keys is bounded.
        middle = (bottom + top) >> 1
        if is_by_value:
            middle = _key(0.5 * _value(bottom) + 0.5 * _value(top))
        middle = tl.minimum(tl.maximum(middle, bottom + 1), top - 1)
        count, mass = weigh(p_values, num, _value(middle), high, highest, scale, BLOCK)
        is_enough = tl.where(top_k > 0, count >= top_k, mass.to(tl.float64) >= least_mass)
        bottom = tl.where(is_enough, middle, bottom)
        num_low = tl.where(is_enough, count, num_low)
        top = tl.where(is_enough, top, middle)
        num_top = tl.where(is_enough, num_top, count)
        is_by_value = not is_by_value
    return _value(bottom)
