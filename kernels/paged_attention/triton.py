"""``attend`` as kernels: rows that decode share their keys among splits, chunks are cut in tiles.

Both go through the keys with the running maximum and sum of FlashAttention (arXiv 2205.14135), in
powers of two. Keys are taken from a row's first visible one on, so that no tile needs a mask at its
beginning, and what a row's result is does not depend on other rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.device import TILE, ChunkRows, DecodeRows, DeviceAttention

LOG2_E = 1.4426950408889634
# At batch 1 of 8 KV heads 16 splits are 128 programs, about as many as an H200 has processors.
NUM_SPLITS = 16
# Rows of queries in a program that decodes: a product wants 16 and gets slow above 64.
MIN_QUERIES, MAX_QUERIES = 16, 64
# Blocks are looked up two stages before their keys are used, which are on their way for two more.
NUM_STAGES = 5
# All that a thread may have. By itself ptxas stops at 168 and spills, so that one block more would
# fit, for which there is no shared memory.
MAX_REGISTERS = 255


class Config(NamedTuple):
    num_queries: int  # rows of a program's product: tokens × heads that share keys, or tokens
    num_keys: int  # of a tile
    num_warps: int
    num_stages: int = NUM_STAGES


def decode_config(num_queries: int, head_dim: int, dtype: torch.dtype) -> Config:
    """``num_queries``: tokens of a row × heads that share a KV head. Unmeasured: 64 keys and
    values of 128 in bfloat16 are 32 KiB, so that 64 KiB are on their way to a processor. More warps
    where registers would spill; products in float32 have no tensor cores and take many."""
    if dtype == torch.float32:
        return Config(MIN_QUERIES, 16, 4 if head_dim <= 128 else 8)
    num_rows = min(max(triton.next_power_of_2(num_queries), MIN_QUERIES), MAX_QUERIES)
    num_warps = 4 if num_rows == MIN_QUERIES and head_dim <= 128 else 8
    return Config(num_rows, 64 if head_dim <= 128 else 32, num_warps)


def chunk_config(head_dim: int, dtype: torch.dtype) -> Config:
    """Unmeasured: the largest products whose registers do not spill."""
    if dtype == torch.float32:
        return Config(16, 16, 4 if head_dim <= 128 else 8)
    return Config(TILE, 64, 8) if head_dim <= 128 else Config(64, 32, 8)


def attend(query: Tensor, kv_cache: Tensor, attention: DeviceAttention, scale: float) -> Tensor:
    if not (query.is_contiguous() and kv_cache.is_contiguous()):
        raise ValueError("attend takes contiguous queries and caches")
    out = torch.empty_like(query)
    decode, chunks = attention.decode, attention.chunks
    num_decoded = 0 if decode is None else decode.num_tokens
    if decode is not None:
        _decode(out[:num_decoded], query[:num_decoded], kv_cache, decode, scale)
    if chunks is not None:
        _attend_chunks(out[num_decoded:], query[num_decoded:], kv_cache, chunks, scale)
    return out


def _decode(out: Tensor, query: Tensor, kv_cache: Tensor, rows: DecodeRows, scale: float) -> None:
    """query, out [B * width, H, D]."""
    num_tokens, num_heads, head_dim = query.shape
    block_size, _, num_kv_heads = kv_cache.shape[1:4]
    num_queries = rows.width * (num_heads // num_kv_heads)
    config = decode_config(num_queries, head_dim, query.dtype)
    num_tiles = triton.cdiv(num_queries, config.num_queries)
    shape = (num_tokens, num_heads, NUM_SPLITS)
    partials = torch.empty(*shape, head_dim, dtype=torch.float32, device=query.device)
    weights = torch.empty(shape, dtype=torch.float32, device=query.device)
    lengths = (rows.starts, rows.first_keys, rows.tables.shape[1] * block_size)
    sizes = {
        "WIDTH": rows.width,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "NUM_SPLITS": NUM_SPLITS,
        "BLOCK_KEYS": config.num_keys,
        "BLOCK_DIM": triton.next_power_of_2(head_dim),
    }
    decode_kernel[(num_kv_heads, NUM_SPLITS, len(rows.slots) * num_tiles)](
        query,
        kv_cache,
        rows.slots,
        rows.tables,
        rows.tables.stride(0),
        *lengths,
        scale * LOG2_E,
        partials,
        weights,
        **sizes,
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        NUM_TILES=num_tiles,
        BLOCK_QUERIES=config.num_queries,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=MAX_REGISTERS,
    )
    combine_kernel[(num_tokens, num_heads)](partials, weights, *lengths, out, **sizes, num_warps=2)


def _attend_chunks(
    out: Tensor, query: Tensor, kv_cache: Tensor, chunks: ChunkRows, scale: float
) -> None:
    """query, out [chunk tokens, H, D]."""
    _, num_heads, head_dim = query.shape
    block_size, _, num_kv_heads = kv_cache.shape[1:4]
    config = chunk_config(head_dim, query.dtype)
    num_parts = TILE // config.num_queries
    chunk_kernel[(len(chunks.tile_rows) * num_parts, num_heads)](
        query,
        kv_cache,
        chunks.slots,
        chunks.tables,
        chunks.tables.stride(0),
        chunks.starts,
        chunks.first_keys,
        chunks.tables.shape[1] * block_size,
        chunks.token_starts,
        chunks.tile_rows,
        chunks.tile_starts,
        scale * LOG2_E,
        out,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        NUM_PARTS=num_parts,
        BLOCK_QUERIES=config.num_queries,
        BLOCK_KEYS=config.num_keys,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit
def decode_kernel(
    p_query,  # [B * WIDTH, H, D]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv, D]
    p_slots,  # [B] int32
    p_tables,  # [N, table_stride] int32
    table_stride,
    p_starts,  # [B] int32
    p_first_keys,  # [B] int32 | None
    max_keys,  # what a table has room for
    scale,  # by which scores are exponents of two
    p_partials,  # [B * WIDTH, H, NUM_SPLITS, D] float32
    p_weights,  # [B * WIDTH, H, NUM_SPLITS] float32
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A program: one split of the keys of one KV head, for a tile of one row's queries."""
    i_kv_head, i_split = tl.program_id(0), tl.program_id(1)
    i_row, i_tile = tl.program_id(2) // NUM_TILES, tl.program_id(2) % NUM_TILES
    start = tl.load(p_starts + i_row)
    first, end, split_size = _splits(
        start, p_first_keys, i_row, max_keys, WIDTH, NUM_SPLITS, BLOCK_KEYS
    )
    split_first = first + i_split * split_size
    split_end = end if i_split == NUM_SPLITS - 1 else min(split_first + split_size, end)
    if split_first >= end:
        return

    group_size: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    o_dim = tl.arange(0, BLOCK_DIM)
    o_query = i_tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_query = o_query < WIDTH * group_size
    o_token = o_query // group_size
    o_head = i_kv_head * group_size + o_query % group_size
    o_place = (i_row.to(tl.int64) * WIDTH + o_token) * NUM_HEADS + o_head
    is_there = is_query[:, None] & (o_dim < HEAD_DIM)[None, :]
    p_own = p_query + o_place[:, None] * HEAD_DIM + o_dim[None, :]
    b_query = tl.load(p_own, mask=is_there, other=0)

    p_table = p_tables + tl.load(p_slots + i_row).to(tl.int64) * table_stride
    acc, top, total = _attend_keys(
        b_query,
        start + o_token,
        p_kv_cache + i_kv_head * HEAD_DIM,
        p_table,
        split_first,
        start,
        split_end,
        scale,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_QUERIES,
        BLOCK_KEYS,
        BLOCK_DIM,
    )
    # A token that sees none of the split's keys has weight 2^-inf, of a sum of zeros.
    total = tl.where(total == 0, 1, total)
    b_partial = acc / total[:, None]
    o_partial = o_place * NUM_SPLITS + i_split
    tl.store(p_partials + o_partial[:, None] * HEAD_DIM + o_dim[None, :], b_partial, mask=is_there)
    tl.store(p_weights + o_partial, top + tl.log2(total), mask=is_query)


@triton.jit
def combine_kernel(
    p_partials,  # [B * WIDTH, H, NUM_SPLITS, D] float32
    p_weights,  # [B * WIDTH, H, NUM_SPLITS] float32
    p_starts,  # [B] int32
    p_first_keys,  # [B] int32 | None
    max_keys,
    p_out,  # [B * WIDTH, H, D]
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A program: one token's head. Only the splits that have keys were written."""
    i_token = tl.program_id(0)
    i_row = i_token // WIDTH
    start = tl.load(p_starts + i_row)
    first, end, split_size = _splits(
        start, p_first_keys, i_row, max_keys, WIDTH, NUM_SPLITS, BLOCK_KEYS
    )
    o_place = i_token.to(tl.int64) * NUM_HEADS + tl.program_id(1)
    o_split = tl.arange(0, NUM_SPLITS)
    o_dim = tl.arange(0, BLOCK_DIM)
    is_split = first + o_split * split_size < end
    is_dim = o_dim < HEAD_DIM
    o_partial = o_place * NUM_SPLITS + o_split
    b_weight = tl.load(p_weights + o_partial, mask=is_split, other=float("-inf"))
    p_partial = p_partials + o_partial[:, None] * HEAD_DIM + o_dim[None, :]
    b_partial = tl.load(p_partial, mask=is_split[:, None] & is_dim[None, :], other=0)
    b_weight = tl.exp2(b_weight - tl.max(b_weight, 0))
    b_out = tl.sum(b_partial * b_weight[:, None], 0) / tl.sum(b_weight, 0)
    tl.store(p_out + o_place * HEAD_DIM + o_dim, b_out.to(p_out.dtype.element_ty), mask=is_dim)


@triton.jit
def chunk_kernel(
    p_query,  # [chunk tokens, H, D]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, 2, H_kv, D]
    p_slots,  # [R] int32
    p_tables,  # [N, table_stride] int32
    table_stride,
    p_starts,  # [R] int32
    p_first_keys,  # [R] int32 | None
    max_keys,
    p_token_starts,  # [R + 1] int32
    p_tile_rows,  # [num_tiles] int32
    p_tile_starts,  # [num_tiles] int32
    scale,
    p_out,  # [chunk tokens, H, D]
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A program: one head of a tile, or of one of its NUM_PARTS parts.

    A chunk's last tiles have the most keys, so the last tiles go first. Programs next to each other
    share a head, so that its keys stay in L2.
    """
    i_part = tl.num_programs(0) - 1 - tl.program_id(0)
    i_tile, i_head = i_part // NUM_PARTS, tl.program_id(1)
    i_row = tl.load(p_tile_rows + i_tile)
    token_start = tl.load(p_token_starts + i_row)
    num_tokens = tl.load(p_token_starts + i_row + 1) - token_start
    part_start = tl.load(p_tile_starts + i_tile) + i_part % NUM_PARTS * BLOCK_QUERIES
    if part_start >= num_tokens:
        return

    start = tl.load(p_starts + i_row)
    first = 0 if p_first_keys is None else tl.load(p_first_keys + i_row)
    end = min(start + min(part_start + BLOCK_QUERIES, num_tokens), max_keys)
    o_dim = tl.arange(0, BLOCK_DIM)
    o_token = part_start + tl.arange(0, BLOCK_QUERIES)
    o_place = (token_start.to(tl.int64) + o_token) * NUM_HEADS + i_head
    o_own = o_place[:, None] * HEAD_DIM + o_dim[None, :]
    is_there = (o_token < num_tokens)[:, None] & (o_dim < HEAD_DIM)[None, :]
    b_query = tl.load(p_query + o_own, mask=is_there, other=0)

    acc, _, total = _attend_keys(
        b_query,
        start + o_token,
        p_kv_cache + i_head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM,
        p_tables + tl.load(p_slots + i_row).to(tl.int64) * table_stride,
        first,
        start + part_start,
        end,
        scale,
        NUM_KV_HEADS,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_QUERIES,
        BLOCK_KEYS,
        BLOCK_DIM,
    )
    b_out = acc / total[:, None]
    tl.store(p_out + o_own, b_out.to(p_out.dtype.element_ty), mask=is_there)


@triton.jit
def _splits(
    start,
    p_first_keys,
    i_row,
    max_keys,
    WIDTH: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """A row's first key, the end of its keys, and the keys of a split: whole tiles, so that a
    row's splits change once in NUM_SPLITS tiles only. They follow from the first token's keys,
    since how many more tokens the row has is not its own business: the last split takes the rest.
    """
    first = 0 if p_first_keys is None else tl.load(p_first_keys + i_row)
    end = min(start + WIDTH, max_keys)
    num_tiles = tl.cdiv(max(start + 1 - first, 1), BLOCK_KEYS)
    return first, end, tl.cdiv(num_tiles, NUM_SPLITS) * BLOCK_KEYS


@triton.jit
def _attend_keys(
    b_query,  # [BLOCK_QUERIES, BLOCK_DIM]
    o_last,  # [BLOCK_QUERIES]: the last key that each query sees
    p_kv,  # the KV head's first key in the cache
    p_table,  # [max_blocks] int32: the row's
    first,
    last_shared,  # all queries see the keys up to this one
    end,
    scale,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Keys first … end - 1 → sums of values [BLOCK_QUERIES, BLOCK_DIM] relative to 2^top, top and
    the sums of weights [BLOCK_QUERIES]."""
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_DIM), tl.float32)
    top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    num_shared = max(min(last_shared + 1, end) - first, 0)
    tail = first + num_shared // BLOCK_KEYS * BLOCK_KEYS
    for key in tl.range(first, tail, BLOCK_KEYS):
        acc, top, total = _attend_tile(
            b_query, o_last, p_kv, p_table, key, last_shared, end, scale, acc, top, total,
            False, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_KEYS, BLOCK_DIM,
        )  # fmt: skip
    for key in tl.range(tail, end, BLOCK_KEYS):
        acc, top, total = _attend_tile(
            b_query, o_last, p_kv, p_table, key, last_shared, end, scale, acc, top, total,
            True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_KEYS, BLOCK_DIM,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def _attend_tile(
    b_query,
    o_last,
    p_kv,
    p_table,
    key,
    last_shared,
    end,
    scale,
    acc,
    top,
    total,
    IS_TAIL: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """Keys key … key + BLOCK_KEYS - 1: all are seen by all queries unless IS_TAIL."""
    o_key = key + tl.arange(0, BLOCK_KEYS)
    o_dim = tl.arange(0, BLOCK_DIM)
    is_loaded = (o_dim < HEAD_DIM)[None, :]
    if IS_TAIL:
        is_loaded &= (o_key < end)[:, None]
        b_block = tl.load(p_table + o_key // BLOCK_SIZE, mask=o_key < end, other=0)
    else:
        b_block = tl.load(p_table + o_key // BLOCK_SIZE)
    o_place = b_block.to(tl.int64) * BLOCK_SIZE + o_key % BLOCK_SIZE
    p_key = p_kv + o_place[:, None] * (2 * NUM_KV_HEADS * HEAD_DIM) + o_dim[None, :]
    b_key = tl.load(p_key, mask=is_loaded, other=0)
    b_value = tl.load(p_key + NUM_KV_HEADS * HEAD_DIM, mask=is_loaded, other=0)

    scores = tl.dot(b_query, tl.trans(b_key), input_precision="ieee") * scale
    if IS_TAIL:
        is_seen = (o_key[None, :] <= o_last[:, None]) & (o_key < end)[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        # What some query must not see may be NaN, which a weight of 0 does not hide.
        is_finite = tl.abs(b_value.to(tl.float32)) < float("inf")
        b_value = tl.where((o_key <= last_shared)[:, None] | is_finite, b_value, 0)
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if IS_TAIL:
        base = tl.where(new_top == float("-inf"), 0, new_top)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(top - base)
    total = total * factor + tl.sum(weights, 1)
    acc = acc * factor[:, None]
    acc = tl.dot(weights.to(b_value.dtype), b_value, acc, input_precision="ieee")
    return acc, new_top, total
