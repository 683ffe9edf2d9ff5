"""Rows that decode: their keys in splits, each a program's, and the splits put together."""

import triton
import triton.language as tl

from kernels.paged_attention.triton.tiles import LOG2_E, attend_keys


@triton.jit
def decode_kernel(
    p_query,  # [B * WIDTH, H, HEAD_DIM]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv, CACHE_DIM]
    p_kv_scales,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv] float32 | None
    p_slots,  # [B] int32
    p_tables,  # [N, table_stride] int32
    table_stride,
    p_starts,  # [B] int32
    p_first_keys,  # [B] int32 | None
    max_keys,  # what a table has room for
    scale,  # by which scores are exponents of two
    p_partials,  # [B * WIDTH, H, NUM_SPLITS, VALUE_DIM] float32
    p_weights,  # [B * WIDTH, H, NUM_SPLITS] float32
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CACHE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """A program: one split of the keys of one KV head, for a tile of one row's queries."""
    i_kv_head, i_split = tl.program_id(0), tl.program_id(1)
    i_row, i_tile = tl.program_id(2) // NUM_TILES, tl.program_id(2) % NUM_TILES
    start = tl.load(p_starts + i_row)
    first, first_split, end, split_size = splits_of(
        start, p_first_keys, i_row, max_keys, WINDOW, WIDTH, NUM_SPLITS, BLOCK_KEYS
    )
    i_place = _place(i_split, first_split, split_size, WINDOW, NUM_SPLITS)
    begin = first_split + i_place * split_size
    split_end = end if i_place == NUM_SPLITS - 1 else min(begin + split_size, end)
    first_shared = first
    if WINDOW is not None:
        begin = max(begin, first // BLOCK_KEYS * BLOCK_KEYS)
        first_shared = max(first, start + WIDTH - WINDOW)
    if begin >= end:
        return

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
        p_kv_cache + i_kv_head * CACHE_DIM,
        p_scales,
        p_table,
        begin,
        first,
        first_shared,
        start,
        split_end,
        scale,
        WINDOW,
        SOFTCAP,
        NUM_KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        CACHE_DIM,
        BLOCK_SIZE,
        BLOCK_QUERIES,
        BLOCK_KEYS,
        BLOCK_DIM,
        BLOCK_VALUE,
    )
    # A token that sees none of the split's keys has weight 2^-inf, of a sum of zeros.
    total = tl.where(total == 0, 1, total)
    b_partial = acc / total[:, None]
    o_partial = o_place * NUM_SPLITS + i_split
    p_partial = p_partials + o_partial[:, None] * VALUE_DIM + o_value[None, :]
    tl.store(p_partial, b_partial, mask=is_query[:, None] & (o_value < VALUE_DIM)[None, :])
    tl.store(p_weights + o_partial, top + tl.log2(total), mask=is_query)


@triton.jit
def combine_kernel(
    p_partials,  # [B * WIDTH, H, NUM_SPLITS, VALUE_DIM] float32
    p_weights,  # [B * WIDTH, H, NUM_SPLITS] float32
    p_starts,  # [B] int32
    p_first_keys,  # [B] int32 | None
    max_keys,
    p_sinks,  # [H] | None
    p_out,  # [B * WIDTH, H, VALUE_DIM]
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """A program: one token's head. Only the splits that have keys were written."""
    i_token, i_head = tl.program_id(0), tl.program_id(1)
    i_row = i_token // WIDTH
    start = tl.load(p_starts + i_row)
    _, first_split, end, split_size = splits_of(
        start, p_first_keys, i_row, max_keys, WINDOW, WIDTH, NUM_SPLITS, BLOCK_KEYS
    )
    o_place = i_token.to(tl.int64) * NUM_HEADS + i_head
    o_split = tl.arange(0, NUM_SPLITS)
    o_value = tl.arange(0, BLOCK_VALUE)
    i_place = _place(o_split, first_split, split_size, WINDOW, NUM_SPLITS)
    is_split = first_split + i_place * split_size < end
    is_value = o_value < VALUE_DIM
    o_partial = o_place * NUM_SPLITS + o_split
    b_weight = tl.load(p_weights + o_partial, mask=is_split, other=float("-inf"))
    p_partial = p_partials + o_partial[:, None] * VALUE_DIM + o_value[None, :]
    b_partial = tl.load(p_partial, mask=is_split[:, None] & is_value[None, :], other=0)
    top = tl.max(b_weight, 0)
    if p_sinks is not None:
        sink = tl.load(p_sinks + i_head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    if WINDOW is not None:  # a draft beyond the table's last key may see none
        top = tl.where(top == float("-inf"), 0.0, top)
    b_weight = tl.exp2(b_weight - top)
    total = tl.sum(b_weight, 0)
    if WINDOW is not None:
        total = tl.where(total == 0, 1.0, total)
    if p_sinks is not None:
        total += tl.exp2(sink - top)
    b_out = tl.sum(b_partial * b_weight[:, None], 0) / total
    tl.store(p_out + o_place * VALUE_DIM + o_value, b_out.to(p_out.dtype.element_ty), mask=is_value)


@triton.jit
def splits_of(
    start,
    p_first_keys,
    i_row,
    max_keys,
    WINDOW: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """A row's first key, where its first split begins, the end of its keys, and the keys of a
    split: whole tiles, so that their number changes once in NUM_SPLITS tiles only. It follows from
    the first token's keys, since how many more tokens the row has is not its own business: the last
    split takes the rest.

    With a window the splits of a size are at the same places for all tokens, and one is kept for
    what the first split has before the row's first key.
    """
    first = 0 if p_first_keys is None else tl.load(p_first_keys + i_row)
    if WINDOW is not None:
        first = max(first, start + 1 - WINDOW)
    end = min(start + WIDTH, max_keys)
    num_tiles = tl.cdiv(max(start + 1 - first, 1), BLOCK_KEYS)
    if WINDOW is None:
        first_split = first
        split_size = tl.cdiv(num_tiles, NUM_SPLITS) * BLOCK_KEYS
    else:
        split_size = tl.cdiv(num_tiles + 1, max(NUM_SPLITS - 1, 1)) * BLOCK_KEYS
        first_split = first // split_size * split_size
    return first, first_split, end, split_size


@triton.jit
def _place(i_split, first_split, split_size, WINDOW: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """Which split of the row program ``i_split`` has. With a window a split is the same program's
    for all tokens, so that partial sums are added up in the same order."""
    if WINDOW is None:
        return i_split
    return (i_split + NUM_SPLITS - first_split // split_size % NUM_SPLITS) % NUM_SPLITS
