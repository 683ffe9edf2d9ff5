"""Attention of a tile of queries to a range of keys, tile by tile, with the running maximum and sum
of FlashAttention (arXiv 2205.14135), in powers of two."""

import triton
import triton.language as tl

from kernels.kv_codes.triton import E4M3_UNIT, widen

# Weights for int8 keys are scaled up, so that scales do not make them too small for float16.
INT8_LIFT = tl.constexpr(128.0)
# The hardware's limit per thread. By default ptxas stops at 128 or 168 registers and spills, to fit
# one more block, for which shared memory has no room.
MAX_REGISTERS = 255
# Fully visible tiles are computed without masks. A multiplication and an addition would be fused
# there, and a token's bits would depend on the start of its row.
EXACT = {"enable_fp_fusion": False}
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    b_query,  # [BLOCK_QUERIES, BLOCK_DIM]
    o_own,  # [BLOCK_QUERIES]: the key of each query; a window ends there
    o_last,  # [BLOCK_QUERIES]: the last visible key of each query
    p_kv,  # the KV head's first key in the cache
    p_scales,  # the scale of that key | None
    p_table,  # [max_blocks] int32: the row's
    base,  # start of the row's first tile
    first,  # the first key visible to any query; without a window ``base``
    first_shared,  # all queries see the keys from this one
    last_shared,  # to this one
    end,
    scale,
    i_split,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CACHE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Attends to the keys first … end - 1 of split ``i_split`` → sums of values [BLOCK_QUERIES,
    BLOCK_VALUE] relative to 2^top, top and the sums of weights [BLOCK_QUERIES]."""
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_VALUE), tl.float32)
    top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    tail = max(min(last_shared + 1, end) - base, 0) // BLOCK_KEYS
    own_tail = own_tiles(tail, i_split, NUM_SPLITS, SPLIT_TILES)
    # Queries of padding may lie a window beyond the last key of their table.
    num_tiles = tl.cdiv(max(end - base, 0), BLOCK_KEYS)
    own_end = own_tiles(num_tiles, i_split, NUM_SPLITS, SPLIT_TILES)
    own_shared = 0
    if WINDOW is not None:
        own_first = own_tiles((first - base) // BLOCK_KEYS, i_split, NUM_SPLITS, SPLIT_TILES)
        edges = tl.cdiv(max(first_shared - base, 0), BLOCK_KEYS)
        own_shared = min(own_tiles(edges, i_split, NUM_SPLITS, SPLIT_TILES), own_end)
        for own in tl.range(own_first, own_shared):
            key = base + place_of_tile(own, i_split, NUM_SPLITS, SPLIT_TILES) * BLOCK_KEYS
            acc, top, total = _attend_tile(
                b_query, o_own, o_last, p_kv, p_scales, p_table, key, first, first_shared,
                last_shared, end, scale, acc, top, total, True, WINDOW, SOFTCAP, NUM_KV_HEADS,
                HEAD_DIM, VALUE_DIM, CACHE_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE,
                BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE,
            )  # fmt: skip
    for own in tl.range(own_shared, own_tail):
        key = base + place_of_tile(own, i_split, NUM_SPLITS, SPLIT_TILES) * BLOCK_KEYS
        acc, top, total = _attend_tile(
            b_query, o_own, o_last, p_kv, p_scales, p_table, key, first, first_shared, last_shared,
            end, scale, acc, top, total, False, WINDOW, SOFTCAP, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM,
            CACHE_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    for own in tl.range(max(own_shared, own_tail), own_end):
        key = base + place_of_tile(own, i_split, NUM_SPLITS, SPLIT_TILES) * BLOCK_KEYS
        acc, top, total = _attend_tile(
            b_query, o_own, o_last, p_kv, p_scales, p_table, key, first, first_shared, last_shared,
            end, scale, acc, top, total, True, WINDOW, SOFTCAP, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM,
            CACHE_DIM, BLOCK_SIZE, BLOCK_STRIDE, SCALES_STRIDE, BLOCK_KEYS, BLOCK_DIM, BLOCK_VALUE,
        )  # fmt: skip
    if p_scales is not None and p_kv.dtype.element_ty == tl.int8:
        acc *= 1 / INT8_LIFT
    return acc, top, total


@triton.jit
def own_tiles(num_tiles, i_split, NUM_SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr):
    """The number of a row's first tiles that belong to ``i_split``: each split has SPLIT_TILES in
    turn."""
    if NUM_SPLITS == 1:
        return num_tiles
    turn: tl.constexpr = NUM_SPLITS * SPLIT_TILES
    rest = num_tiles % turn - i_split * SPLIT_TILES
    return num_tiles // turn * SPLIT_TILES + tl.minimum(tl.maximum(rest, 0), SPLIT_TILES)


@triton.jit
def place_of_tile(own, i_split, NUM_SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr):
    """The index in the row of the split's tile ``own``."""
    if NUM_SPLITS == 1:
        return own
    num_before = own // SPLIT_TILES * NUM_SPLITS + i_split
    return num_before * SPLIT_TILES + own % SPLIT_TILES


@triton.jit
def _attend_tile(
    b_query,
    o_own,
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
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Keys key … key + BLOCK_KEYS - 1; all queries see all of them unless IS_EDGE."""
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
    o_block, o_place = b_block.to(tl.int64), o_key % BLOCK_SIZE * (2 * NUM_KV_HEADS)
    p_entry = p_kv + (o_block * BLOCK_STRIDE + o_place * CACHE_DIM)[:, None]
    b_key = tl.load(p_entry + o_dim[None, :], mask=is_key_loaded, other=0)
    p_value = p_entry + o_value[None, :] + NUM_KV_HEADS * CACHE_DIM
    b_value = tl.load(p_value, mask=is_value_loaded, other=0)
    if p_scales is not None:
        p_scale = p_scales + o_block * SCALES_STRIDE + o_place
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
            is_seen &= o_key[None, :] > o_own[:, None] - WINDOW
            is_shared &= o_key >= first_shared
        scores = tl.where(is_seen, scores, float("-inf"))
        if p_scales is None:
            # Hidden values may be NaN, and NaN times a weight of 0 is NaN.
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
    """SOFTCAP · tanh(scores / SOFTCAP), both in base 2."""
    power = tl.exp2(tl.abs(scores) * (-2 / SOFTCAP))
    capped = (1 - power) / (1 + power) * (SOFTCAP * LOG2_E)
    return tl.where(scores < 0, -capped, capped)
