"""Prefill chunks: each program has some heads of a tile of tokens, or of a part of a tile."""

import triton
import triton.language as tl

from kernels.paged_attention.triton.tiles import LOG2_E, attend_keys


@triton.jit
def chunk_kernel(
    p_query,  # [T, H, HEAD_DIM]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv, CACHE_DIM], strided
    p_kv_scales,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv] float32, strided | None
    p_slots,  # [R] int32
    p_tables,  # [N, table_stride] int32
    table_stride,
    p_starts,  # [R] int32
    p_first_keys,  # [R] int32 | None
    max_keys,
    p_ends,  # [T] int32 | None
    p_token_starts,  # [R + 1] int32
    p_tile_rows,  # [num_tiles] int32
    p_tile_starts,  # [num_tiles] int32
    scale,  # of scores in base 2
    p_sinks,  # [H] | None
    p_out,  # [T, H, VALUE_DIM]
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CACHE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """One program per NUM_SHARED heads of a KV head and one of the NUM_PARTS parts of a tile.

    The last tiles of a chunk have the most keys, so they go first. Neighbouring programs share
    heads, so that their keys stay in L2.
    """
    BLOCK_TOKENS: tl.constexpr = BLOCK_QUERIES // NUM_SHARED
    i_part = tl.num_programs(0) - 1 - tl.program_id(0)
    i_tile, first_head = i_part // NUM_PARTS, tl.program_id(1) * NUM_SHARED
    i_row = tl.load(p_tile_rows + i_tile)
    token_start = tl.load(p_token_starts + i_row)
    num_tokens = tl.load(p_token_starts + i_row + 1) - token_start
    part_start = tl.load(p_tile_starts + i_tile) + i_part % NUM_PARTS * BLOCK_TOKENS
    if part_start >= num_tokens:
        return

    start = tl.load(p_starts + i_row)
    first = 0 if p_first_keys is None else tl.load(p_first_keys + i_row)
    end = min(start + min(part_start + BLOCK_TOKENS, num_tokens), max_keys)
    begin, first_shared = first, first
    if WINDOW is not None:
        first = max(first, start + part_start + 1 - WINDOW)
        first_shared = max(first, start + part_start + BLOCK_TOKENS - WINDOW)
        begin = first // BLOCK_KEYS * BLOCK_KEYS
    o_dim = tl.arange(0, BLOCK_DIM)
    o_value = tl.arange(0, BLOCK_VALUE)
    o_query = tl.arange(0, BLOCK_QUERIES)
    o_token, o_head = part_start + o_query // NUM_SHARED, first_head + o_query % NUM_SHARED
    o_place = (token_start.to(tl.int64) + o_token) * NUM_HEADS + o_head
    o_own = start + o_token
    o_last = o_own
    if p_ends is not None:
        b_end = tl.load(p_ends + token_start + o_token, mask=o_token < num_tokens, other=0)
        o_last = tl.maximum(o_own, b_end - 1)
        end = min(max(end, tl.max(b_end, 0)), max_keys)
    is_token = (o_token < num_tokens)[:, None]
    p_own = p_query + o_place[:, None] * HEAD_DIM + o_dim[None, :]
    b_query = tl.load(p_own, mask=is_token & (o_dim < HEAD_DIM)[None, :], other=0)

    i_kv_head = first_head // (NUM_HEADS // NUM_KV_HEADS)
    p_scales = None if p_kv_scales is None else p_kv_scales + i_kv_head
    acc, top, total = attend_keys(
        b_query,
        o_own,
        o_last,
        p_kv_cache + i_kv_head * CACHE_DIM,
        p_scales,
        p_tables + tl.load(p_slots + i_row).to(tl.int64) * table_stride,
        begin,
        first,
        first_shared,
        start + part_start,
        end,
        scale,
        0,
        1,
        1,
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
    if p_sinks is not None:
        sink = tl.load(p_sinks + o_head).to(tl.float32) * LOG2_E
        with_sink = tl.maximum(top, sink)
        factor = tl.exp2(top - with_sink)
        acc = acc * factor[:, None]
        total = total * factor + tl.exp2(sink - with_sink)
    elif WINDOW is not None:  # rows after the chunk's last token may see no key
        total = tl.where(total == 0, 1, total)
    b_out = acc / total[:, None]
    p_result = p_out + o_place[:, None] * VALUE_DIM + o_value[None, :]
    is_stored = is_token & (o_value < VALUE_DIM)[None, :]
    tl.store(p_result, b_out.to(p_out.dtype.element_ty), mask=is_stored)
