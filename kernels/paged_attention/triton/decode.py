"""Decode rows: each program has a split of the keys, and the last one combines the splits.

Splits take a row's tiles in turn. A key's split therefore depends on the key's place alone: it is
the same for every token, and more keys change nothing in earlier splits.
"""

import triton
import triton.language as tl

from kernels.paged_attention.triton.tiles import LOG2_E, attend_keys, own_tiles
from kernels.programmatic_launch.triton import begin

COMBINED_QUERIES = tl.constexpr(8)  # per iteration: more parts, all in flight, fill the registers


@triton.jit
def decode_kernel(
    p_query,  # [B * WIDTH, H, HEAD_DIM]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv, CACHE_DIM], strided
    p_kv_scales,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv] float32, strided | None
    p_slots,  # [B] int32
    p_tables,  # [N, table_stride] int32
    table_stride,
    p_starts,  # [B] int32
    p_first_keys,  # [B] int32 | None
    max_keys,  # capacity of a table
    scale,  # of scores in base 2
    p_partials,  # [B * WIDTH, H, NUM_SPLITS, VALUE_DIM] float32
    p_weights,  # [B * WIDTH, H, NUM_SPLITS] float32
    p_arrivals,  # [at least B * H_kv] int32, zeros
    p_sinks,  # [H] | None
    p_out,  # [B * WIDTH, H, VALUE_DIM]
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CACHE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program per split of the keys of one KV head and tile of one row's queries. The last
    program of a row's KV head combines all splits."""
    begin(IS_DEPENDENT)
    i_kv_head, i_split = tl.program_id(0), tl.program_id(1)
    i_row, i_tile = tl.program_id(2) // NUM_TILES, tl.program_id(2) % NUM_TILES
    start = tl.load(p_starts + i_row)
    base, first, end = keys_of(start, p_first_keys, i_row, max_keys, WINDOW, WIDTH)
    first_tile, end_tile = (first - base) // BLOCK_KEYS, tl.cdiv(end - base, BLOCK_KEYS)
    if tiles_between(first_tile, end_tile, i_split, NUM_SPLITS, SPLIT_TILES) == 0:
        return
    first_shared = first
    if WINDOW is not None:
        first_shared = max(first, start + WIDTH - WINDOW)

    group_size: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    o_dim = tl.arange(0, BLOCK_DIM)
    o_value = tl.arange(0, BLOCK_VALUE)
    o_query = i_tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_query = o_query < WIDTH * group_size
    o_token = o_query // group_size
    o_head = i_kv_head * group_size + o_query % group_size
    o_place = (i_row.to(tl.int64) * WIDTH + o_token) * NUM_HEADS + o_head
    p_own = p_query + o_place[:, None] * HEAD_DIM + o_dim[None, :]
    b_query = tl.load(p_own, mask=is_query[:, None] & (o_dim < HEAD_DIM)[None, :], other=0)

    p_table = p_tables + tl.load(p_slots + i_row).to(tl.int64) * table_stride
    p_scales = None if p_kv_scales is None else p_kv_scales + i_kv_head
    acc, top, total = attend_keys(
        b_query,
        start + o_token,
        start + o_token,
        p_kv_cache + i_kv_head * CACHE_DIM,
        p_scales,
        p_table,
        base,
        first,
        first_shared,
        start,
        end,
        scale,
        i_split,
        NUM_SPLITS,
        SPLIT_TILES,
        WINDOW,
        SOFTCAP,
        NUM_KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        CACHE_DIM,
        BLOCK_SIZE,
        BLOCK_STRIDE,
        SCALES_STRIDE,
        BLOCK_QUERIES,
        BLOCK_KEYS,
        BLOCK_DIM,
        BLOCK_VALUE,
    )
    # A token that sees no key of the split has weight 2^-inf and a sum of zeros.
    total = tl.where(total == 0, 1, total)
    b_partial = acc / total[:, None]
    o_partial = o_place * NUM_SPLITS + i_split
    p_partial = p_partials + o_partial[:, None] * VALUE_DIM + o_value[None, :]
    tl.store(p_partial, b_partial, mask=is_query[:, None] & (o_value < VALUE_DIM)[None, :])
    tl.store(p_weights + o_partial, top + tl.log2(total), mask=is_query)
    # All threads have stored before one of them announces it, and sees the others' stores.
    tl.debug_barrier()
    p_arrived = p_arrivals + i_row * NUM_KV_HEADS + i_kv_head
    num_before = tl.atomic_add(p_arrived, 1, sem="acq_rel")
    num_splits = (end_tile - 1) // SPLIT_TILES - first_tile // SPLIT_TILES + 1
    if num_before + 1 == min(num_splits, NUM_SPLITS) * NUM_TILES:
        tl.store(p_arrived, 0)  # this was the last program of the launch
        _combine_row(
            p_partials, p_weights, p_sinks, p_out, i_row, i_kv_head, first_tile, end_tile,
            WIDTH, NUM_HEADS, group_size, NUM_SPLITS, SPLIT_TILES, VALUE_DIM, BLOCK_VALUE,
        )  # fmt: skip


@triton.jit
def _combine_row(
    p_partials,
    p_weights,
    p_sinks,
    p_out,
    i_row,
    i_kv_head,
    first_tile,
    end_tile,
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Combines the splits of all queries of a row that share a KV head."""
    for first_query in tl.range(0, WIDTH * GROUP_SIZE, COMBINED_QUERIES):
        o_query = first_query + tl.arange(0, COMBINED_QUERIES)
        o_head = i_kv_head * GROUP_SIZE + o_query % GROUP_SIZE
        o_place = (i_row.to(tl.int64) * WIDTH + o_query // GROUP_SIZE) * NUM_HEADS + o_head
        _combine(
            p_partials, p_weights, p_sinks, p_out, o_place, o_head, o_query < WIDTH * GROUP_SIZE,
            first_tile, end_tile, NUM_SPLITS, SPLIT_TILES, COMBINED_QUERIES, VALUE_DIM,
            BLOCK_VALUE,
        )  # fmt: skip


@triton.jit
def _combine(
    p_partials,
    p_weights,
    p_sinks,
    p_out,
    o_place,  # [BLOCK_QUERIES]: tokens × heads
    o_head,  # [BLOCK_QUERIES]
    is_query,  # [BLOCK_QUERIES]
    first_tile,
    end_tile,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """Adds up the splits in their order; only splits with keys were written. Other multiprocessors
    wrote them, so loads bypass this one's cache, which may be outdated."""
    o_value = tl.arange(0, BLOCK_VALUE)
    is_value = (o_value < VALUE_DIM)[None, :]
    p_weight = p_weights + o_place * NUM_SPLITS
    p_partial = p_partials + (o_place * NUM_SPLITS * VALUE_DIM)[:, None] + o_value[None, :]
    top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    if p_sinks is not None:
        sink = tl.load(p_sinks + o_head, mask=is_query, other=0).to(tl.float32) * LOG2_E
        top = sink
    for i_split in tl.static_range(NUM_SPLITS):
        num_own = tiles_between(first_tile, end_tile, i_split, NUM_SPLITS, SPLIT_TILES)
        is_there = tl.where(is_query, num_own, 0) > 0
        weight = tl.load(
            p_weight + i_split, mask=is_there, other=float("-inf"), cache_modifier=".cg"
        )
        top = tl.maximum(top, weight)
    # A padding query, or a draft after the table's last key, may see no key.
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    if p_sinks is not None:
        total += tl.exp2(sink - top)
    b_out = tl.zeros((BLOCK_QUERIES, BLOCK_VALUE), tl.float32)
    for i_split in tl.static_range(NUM_SPLITS):
        num_own = tiles_between(first_tile, end_tile, i_split, NUM_SPLITS, SPLIT_TILES)
        is_there = tl.where(is_query, num_own, 0) > 0
        weight = tl.load(
            p_weight + i_split, mask=is_there, other=float("-inf"), cache_modifier=".cg"
        )
        b_partial = tl.load(
            p_partial + i_split * VALUE_DIM,
            mask=is_there[:, None] & is_value,
            other=0,
            cache_modifier=".cg",
        )
        weight = tl.exp2(weight - top)
        total += weight
        b_out += b_partial * weight[:, None]
    b_out /= tl.where(total == 0, 1.0, total)[:, None]
    p_own = p_out + o_place[:, None] * VALUE_DIM + o_value[None, :]
    tl.store(p_own, b_out.to(p_out.dtype.element_ty), mask=is_query[:, None] & is_value)


@triton.jit
def keys_of(start, p_first_keys, i_row, max_keys, WINDOW: tl.constexpr, WIDTH: tl.constexpr):
    """The start of a row's tiles, equal for all of its tokens; its first key, and the end of its
    keys."""
    base = 0 if p_first_keys is None else tl.load(p_first_keys + i_row)
    first = base
    if WINDOW is not None:
        first = max(base, start + 1 - WINDOW)
    return base, first, min(start + WIDTH, max_keys)


@triton.jit
def tiles_between(
    first_tile, end_tile, i_split, NUM_SPLITS: tl.constexpr, SPLIT_TILES: tl.constexpr
):
    """The number of tiles in [first_tile, end_tile) that belong to ``i_split``."""
    num_before = own_tiles(first_tile, i_split, NUM_SPLITS, SPLIT_TILES)
    return own_tiles(end_tile, i_split, NUM_SPLITS, SPLIT_TILES) - num_before
