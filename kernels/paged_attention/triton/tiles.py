"""Attention of a tile of queries to a range of keys, a tile of these after the other, with the
running maximum and sum of FlashAttention (arXiv 2205.14135), in powers of two."""

import triton
import triton.language as tl

from kernels.kv_codes.triton import E4M3_UNIT, widen

# Weights for codes of int8 are lifted, so that scales do not make them too small for float16.
INT8_LIFT = tl.constexpr(128.0)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    b_query,  # [BLOCK_QUERIES, BLOCK_DIM]
    o_last,  # [BLOCK_QUERIES]: the last key that each query sees
    p_kv,  # the KV head's first key in the cache
    p_scales,  # the same of the scales of codes | None
    p_table,  # [max_blocks] int32: the row's
    begin,  # the first tile's first key
    first,  # the first key that any query sees, which without a window is ``begin``
    first_shared,  # all queries see the keys from this one
    last_shared,  # to this one
    end,
    scale,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CACHE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Keys first … end - 1 → sums of values [BLOCK_QUERIES, BLOCK_VALUE] relative to 2^top, top and
    the sums of weights [BLOCK_QUERIES]."""
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_VALUE), tl.float32)
    top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    if WINDOW is not None:
        num_edges = tl.cdiv(max(first_shared - begin, 0), BLOCK_KEYS)
        shared = min(begin + num_edges * BLOCK_KEYS, end)
        for key in tl.range(begin, shared, BLOCK_KEYS):
            acc, top, total = _attend_tile(
                b_query, o_last, p_kv, p_scales, p_table, key, first, first_shared, last_shared,
                end, scale, acc, top, total, True, WINDOW, SOFTCAP, NUM_KV_HEADS, HEAD_DIM,
                VALUE_DIM, CACHE_DIM, BLOCK_SIZE, BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE,
            )  # fmt: skip
    else:
        shared = begin
    num_shared = max(min(last_shared + 1, end) - shared, 0)
    tail = shared + num_shared // BLOCK_KEYS * BLOCK_KEYS
    for key in tl.range(shared, tail, BLOCK_KEYS):
        acc, top, total = _attend_tile(
            b_query, o_last, p_kv, p_scales, p_table, key, first, first_shared, last_shared, end,
            scale, acc, top, total, False, WINDOW, SOFTCAP, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM,
            CACHE_DIM, BLOCK_SIZE, BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    for key in tl.range(tail, end, BLOCK_KEYS):
        acc, top, total = _attend_tile(
            b_query, o_last, p_kv, p_scales, p_table, key, first, first_shared, last_shared, end,
            scale, acc, top, total, True, WINDOW, SOFTCAP, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM,
            CACHE_DIM, BLOCK_SIZE, BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    if p_scales is not None and p_kv.dtype.element_ty == tl.int8:
        acc *= 1 / INT8_LIFT
    return acc, top, total


@triton.jit
def _attend_tile(
    b_query,
    o_last,
    p_kv,
    p_scales,
    p_table,
    key,
    first,
    first_shared,
    last_shared,
    end,
    scale,
    acc,
    top,
    total,
    IS_EDGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CACHE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Keys key … key + BLOCK_KEYS - 1: all are seen by all queries unless IS_EDGE."""
    o_key = key + tl.arange(0, BLOCK_KEYS)
    o_dim = tl.arange(0, BLOCK_DIM)
    o_value = tl.arange(0, BLOCK_VALUE)
    is_key_loaded = (o_dim < HEAD_DIM)[None, :]
    is_value_loaded = (o_value < VALUE_DIM)[None, :]
    if IS_EDGE:
        is_there = o_key < end
        if WINDOW is not None:
            is_there &= o_key >= first
        is_key_loaded &= is_there[:, None]
        is_value_loaded &= is_there[:, None]
        b_block = tl.load(p_table + o_key // BLOCK_SIZE, mask=is_there, other=0)
    else:
        b_block = tl.load(p_table + o_key // BLOCK_SIZE)
    o_place = b_block.to(tl.int64) * BLOCK_SIZE + o_key % BLOCK_SIZE
    p_entry = p_kv + o_place[:, None] * (2 * NUM_KV_HEADS * CACHE_DIM)
    b_key = tl.load(p_entry + o_dim[None, :], mask=is_key_loaded, other=0)
    p_value = p_entry + o_value[None, :] + NUM_KV_HEADS * CACHE_DIM
    b_value = tl.load(p_value, mask=is_value_loaded, other=0)
    if p_scales is not None:
        p_scale = p_scales + o_place * (2 * NUM_KV_HEADS)
        if IS_EDGE:
            b_key_scale = tl.load(p_scale, mask=is_there, other=0)
            b_value_scale = tl.load(p_scale + NUM_KV_HEADS, mask=is_there, other=0)
        else:
            b_key_scale = tl.load(p_scale)
            b_value_scale = tl.load(p_scale + NUM_KV_HEADS)
        if b_key.dtype == tl.int8:
            b_value_scale *= INT8_LIFT
        else:
            b_key_scale *= E4M3_UNIT
            b_value_scale *= E4M3_UNIT
        b_key, b_value = widen(b_key, b_query.dtype), widen(b_value, b_query.dtype)

    scores = tl.dot(b_query, tl.trans(b_key), input_precision="ieee") * scale
    if p_scales is not None:
        scores *= b_key_scale[None, :]
    if SOFTCAP is not None:
        scores = _capped(scores, SOFTCAP)
    if IS_EDGE:
        is_seen = (o_key[None, :] <= o_last[:, None]) & is_there[None, :]
        is_shared = o_key <= last_shared
        if WINDOW is not None:
            is_seen &= o_key[None, :] > o_last[:, None] - WINDOW
            is_shared &= o_key >= first_shared
        scores = tl.where(is_seen, scores, float("-inf"))
        if p_scales is None:
            # What some query must not see may be NaN, which a weight of 0 does not hide.
            is_finite = tl.abs(b_value.to(tl.float32)) < float("inf")
            b_value = tl.where(is_shared[:, None] | is_finite, b_value, 0)
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if IS_EDGE:
        base = tl.where(new_top == float("-inf"), 0, new_top)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(top - base)
    total = total * factor + tl.sum(weights, 1)
    acc = acc * factor[:, None]
    if p_scales is not None:
        weights *= b_value_scale[None, :]
        if IS_EDGE:  # codes are finite, scales may be NaN
            weights = tl.where(is_seen, weights, 0)
    acc = tl.dot(weights.to(b_value.dtype), b_value, acc, input_precision="ieee")
    return acc, new_top, total


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP · tanh(scores / SOFTCAP), where both sides are exponents of two."""
    power = tl.exp2(tl.abs(scores) * (-2 / SOFTCAP))
    capped = (1 - power) / (1 + power) * (SOFTCAP * LOG2_E)
    return tl.where(scores < 0, -capped, capped)
