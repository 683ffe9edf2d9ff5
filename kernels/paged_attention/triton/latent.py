"""Attention over a cache whose row is the key of all heads and, in its beginning, their value: a
program loads each row once for all of its queries, and its value part once for both GEMMs.

Decode rows are divided as in ``decode.py``; in a chunk's tile each program has some queries, with
those of a token next to each other.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_codes import latents
from kernels.kv_codes.triton import E4M3_UNIT, widen
from kernels.paged_attention.device import TILE, ChunkRows, DecodeRows
from kernels.paged_attention.triton.decode import keys_of
from kernels.paged_attention.triton.tiles import (
    EXACT,
    LOG2_E,
    MAX_REGISTERS,
    own_tiles,
    place_of_tile,
)
from kernels.sizes import cdiv, next_power_of_2

MIN_SPLITS, MAX_SPLITS = 16, 128
SPLIT_KEYS = 128  # of a split per turn: fewer are faster for one row, slower for many
BLOCK_SUMS = 64  # elements of a head that a program sums over all splits
GROUP = tl.constexpr(latents.GROUP)


class Config(NamedTuple):
    num_queries: int
    num_keys: int
    num_warps: int
    num_stages: int


class Shape(NamedTuple):
    num_heads: int
    rank: int
    rope_dim: int
    dtype: torch.dtype
    unit: int  # elements of the cache for a number
    block_size: int


def latent_config(dtype: torch.dtype) -> Config:
    """For decode rows. Three stages keep a tile of keys and the block numbers of the next in
    flight. In float32 only 4 warps do not spill with Triton 3.6."""
    return Config(16, 16, 4, 1) if dtype == torch.float32 else Config(16, 32, 8, 3)


def chunk_config(dtype: torch.dtype, *, has_codes: bool = False) -> Config:
    """For prefill chunks: the keys a program reads are shared by 64 queries, or by 32 if they are
    codes, whose values take registers."""
    if dtype == torch.float32:
        return latent_config(dtype)
    return Config(32 if has_codes else 64, 32, 8, 2)


def num_splits(num_heads: int) -> int:
    """Splits of a row's keys, a power of two: times the tiles of its heads, about as many programs
    as a GPU has multiprocessors."""
    tiles = cdiv(num_heads, latent_config(torch.bfloat16).num_queries)
    return min(MAX_SPLITS, max(MIN_SPLITS, MAX_SPLITS // next_power_of_2(tiles)))


def decode(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    rows: DecodeRows,
    tables: Tensor,
    scale: float,
) -> None:
    """Computes the first B * width tokens: query [T, H, rank + rope_dim], out [T, H, rank]."""
    num_tokens, num_heads, rank = rows.num_tokens, *out.shape[1:]
    num_tiles, splits, known = _decode_constants(_shape(query, kv_cache, rank), rows.width)
    parts = num_tokens, num_heads, splits["NUM_SPLITS"]
    partials = out.new_empty(*parts, rank, dtype=torch.float32)
    weights = out.new_empty(parts, dtype=torch.float32)
    lengths = (rows.starts, rows.first_keys, tables.shape[1] * kv_cache.shape[1])
    latent_decode_kernel[splits["NUM_SPLITS"], rows.slots.shape[0] * num_tiles](
        query,
        kv_cache,
        kv_cache.view(query.dtype),
        kv_scales,
        rows.slots,
        tables,
        tables.stride(0),
        *lengths,
        scale * LOG2_E.value,
        partials,
        weights,
        **splits,
        **known,
    )
    block = min(BLOCK_SUMS, known["BLOCK_RANK"])
    latent_sum_kernel[cdiv(rank, block), num_heads, num_tokens](
        partials, weights, *lengths, out, **splits, RANK=rank, BLOCK=block, num_warps=4
    )


@cache
def _decode_constants(shape: Shape, width: int) -> tuple[int, dict[str, int], dict[str, Any]]:
    """The tiles of a row's queries; constants of both launches, and more of the first."""
    config = latent_config(shape.dtype)
    num_tiles = cdiv(width * shape.num_heads, config.num_queries)
    splits = {
        "WIDTH": width,
        "NUM_HEADS": shape.num_heads,
        "NUM_SPLITS": num_splits(shape.num_heads),
        "SPLIT_TILES": max(1, SPLIT_KEYS // config.num_keys),
        "BLOCK_KEYS": config.num_keys,
    }
    return num_tiles, splits, _constants(shape, config) | {"NUM_TILES": num_tiles}


def attend_chunks(
    out: Tensor,
    query: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    chunks: ChunkRows,
    tables: Tensor,
    scale: float,
) -> None:
    """Computes the chunks' tokens: query [T, H, rank + rope_dim], out [T, H, rank]."""
    shape = _shape(query, kv_cache, out.shape[2])
    num_parts, known = _chunk_constants(shape, kv_scales is not None)
    latent_chunk_kernel[chunks.tile_rows.shape[0] * num_parts,](
        query,
        kv_cache,
        kv_cache.view(query.dtype),
        kv_scales,
        chunks.slots,
        tables,
        tables.stride(0),
        chunks.starts,
        chunks.first_keys,
        tables.shape[1] * kv_cache.shape[1],
        chunks.token_starts,
        chunks.tile_rows,
        chunks.tile_starts,
        scale * LOG2_E.value,
        out,
        **known,
    )


@cache
def _chunk_constants(shape: Shape, has_codes: bool) -> tuple[int, dict[str, Any]]:
    """The programs of a tile, and all constants of the launch."""
    config = chunk_config(shape.dtype, has_codes=has_codes)
    num_parts = cdiv(TILE * shape.num_heads, config.num_queries)
    known = {"NUM_PARTS": num_parts, "NUM_HEADS": shape.num_heads, "BLOCK_KEYS": config.num_keys}
    return num_parts, _constants(shape, config) | known


def _shape(query: Tensor, kv_cache: Tensor, rank: int) -> Shape:
    _, num_heads, size = query.shape
    unit = query.itemsize // kv_cache.itemsize
    return Shape(num_heads, rank, size - rank, query.dtype, unit, kv_cache.shape[1])


def _constants(shape: Shape, config: Config) -> dict[str, Any]:
    return {
        "RANK": shape.rank,
        "ROPE_DIM": shape.rope_dim,
        "UNIT": shape.unit,
        "BLOCK_SIZE": shape.block_size,
        "BLOCK_RANK": max(16, next_power_of_2(shape.rank)),
        "BLOCK_ROPE": max(16, next_power_of_2(shape.rope_dim)),
        "BLOCK_QUERIES": config.num_queries,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": MAX_REGISTERS,
        **EXACT,
    }


@triton.jit
def latent_decode_kernel(
    p_query,  # [B * WIDTH, H, RANK + ROPE_DIM]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, RANK + ROPE_DIM * UNIT], numbers or codes
    p_keys,  # the same memory as numbers
    p_kv_scales,  # [num_blocks + 1, BLOCK_SIZE, num_groups] float32 | None
    p_slots,  # [B] int32
    p_tables,  # [N, table_stride] int32
    table_stride,
    p_starts,  # [B] int32
    p_first_keys,  # [B] int32 | None
    max_keys,  # capacity of a table
    scale,  # of scores in base 2
    p_partials,  # [B * WIDTH, H, NUM_SPLITS, RANK] float32
    p_weights,  # [B * WIDTH, H, NUM_SPLITS] float32
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # elements of the cache for a number
    BLOCK_SIZE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    NUM_TILES: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One program per split of the keys and tile of one row's queries."""
    i_split = tl.program_id(0)
    i_row, i_tile = tl.program_id(1) // NUM_TILES, tl.program_id(1) % NUM_TILES
    start = tl.load(p_starts + i_row)
    base, _, end = keys_of(start, p_first_keys, i_row, max_keys, None, WIDTH)
    if own_tiles(tl.cdiv(end - base, BLOCK_KEYS), i_split, NUM_SPLITS, SPLIT_TILES) == 0:
        return

    o_query = i_tile * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    is_query = o_query < WIDTH * NUM_HEADS
    o_place = i_row.to(tl.int64) * WIDTH * NUM_HEADS + o_query
    p_table = p_tables + tl.load(p_slots + i_row).to(tl.int64) * table_stride
    acc, top, total = _attend_keys(
        p_query, o_place, is_query, start + o_query // NUM_HEADS, p_kv_cache, p_keys, p_kv_scales,
        p_table, base, start, end, scale, i_split, NUM_SPLITS, SPLIT_TILES, RANK, ROPE_DIM, UNIT,
        BLOCK_SIZE, BLOCK_QUERIES, BLOCK_KEYS, BLOCK_RANK, BLOCK_ROPE,
    )  # fmt: skip
    # A token that sees no key of the split has weight 2^-inf and a sum of zeros.
    total = tl.where(total == 0, 1, total)
    o_rank = tl.arange(0, BLOCK_RANK)
    o_partial = o_place * NUM_SPLITS + i_split
    p_partial = p_partials + o_partial[:, None] * RANK + o_rank[None, :]
    is_stored = is_query[:, None] & (o_rank < RANK)[None, :]
    tl.store(p_partial, acc / total[:, None], mask=is_stored)
    tl.store(p_weights + o_partial, top + tl.log2(total), mask=is_query)


@triton.jit
def latent_sum_kernel(
    p_partials,  # [B * WIDTH, H, NUM_SPLITS, RANK] float32
    p_weights,  # [B * WIDTH, H, NUM_SPLITS] float32
    p_starts,  # [B] int32
    p_first_keys,  # [B] int32 | None
    max_keys,
    p_out,  # [B * WIDTH, H, RANK]
    WIDTH: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per BLOCK elements of one token's head, over all splits with keys."""
    i_token = tl.program_id(2).to(tl.int64)
    i_row = i_token // WIDTH
    start = tl.load(p_starts + i_row)
    base, _, end = keys_of(start, p_first_keys, i_row, max_keys, None, WIDTH)
    o_split = tl.arange(0, NUM_SPLITS)
    has_keys = own_tiles(tl.cdiv(end - base, BLOCK_KEYS), o_split, NUM_SPLITS, SPLIT_TILES) > 0
    o_part = (i_token * NUM_HEADS + tl.program_id(1)) * NUM_SPLITS + o_split
    o_rank = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_rank = (o_rank < RANK)[None, :]
    weights = tl.load(p_weights + o_part, mask=has_keys, other=float("-inf"))
    p_part = p_partials + o_part[:, None] * RANK + o_rank[None, :]
    b_parts = tl.load(p_part, mask=has_keys[:, None] & is_rank, other=0)
    top = tl.max(weights, 0)
    top = tl.where(top == float("-inf"), 0.0, top)  # a draft after the table's last key
    weights = tl.exp2(weights - top)
    total = tl.sum(weights, 0)
    out = tl.sum(b_parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    p_own = p_out + (i_token * NUM_HEADS + tl.program_id(1)) * RANK + o_rank
    tl.store(p_own, out.to(p_out.dtype.element_ty), mask=o_rank < RANK)


@triton.jit
def latent_chunk_kernel(
    p_query,  # [T, H, RANK + ROPE_DIM]
    p_kv_cache,  # [num_blocks + 1, BLOCK_SIZE, RANK + ROPE_DIM * UNIT], numbers or codes
    p_keys,  # the same memory as numbers
    p_kv_scales,  # [num_blocks + 1, BLOCK_SIZE, num_groups] float32 | None
    p_slots,  # [R] int32
    p_tables,  # [N, table_stride] int32
    table_stride,
    p_starts,  # [R] int32
    p_first_keys,  # [R] int32 | None
    max_keys,
    p_token_starts,  # [R + 1] int32
    p_tile_rows,  # [num_tiles] int32
    p_tile_starts,  # [num_tiles] int32
    scale,  # of scores in base 2
    p_out,  # [T, H, RANK]
    NUM_HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # elements of the cache for a number
    BLOCK_SIZE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One program per part of a tile. The last ones, which have the most keys, go first."""
    i_part = tl.num_programs(0) - 1 - tl.program_id(0)
    i_tile = i_part // NUM_PARTS
    i_row = tl.load(p_tile_rows + i_tile)
    token_start = tl.load(p_token_starts + i_row)
    num_tokens = tl.load(p_token_starts + i_row + 1) - token_start
    tile_start = tl.load(p_tile_starts + i_tile)
    o_query = i_part % NUM_PARTS * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    o_token = tile_start + o_query // NUM_HEADS
    first_token = tile_start + i_part % NUM_PARTS * BLOCK_QUERIES // NUM_HEADS
    if first_token >= num_tokens:
        return

    start = tl.load(p_starts + i_row)
    first = 0 if p_first_keys is None else tl.load(p_first_keys + i_row)
    last_token = min(tl.max(o_token, 0), num_tokens - 1)
    is_query = o_token < num_tokens
    o_place = (token_start + tile_start).to(tl.int64) * NUM_HEADS + o_query
    p_table = p_tables + tl.load(p_slots + i_row).to(tl.int64) * table_stride
    acc, _, total = _attend_keys(
        p_query, o_place, is_query, start + o_token, p_kv_cache, p_keys, p_kv_scales, p_table,
        first, start + first_token, min(start + last_token + 1, max_keys), scale, 0, 1, 1, RANK,
        ROPE_DIM, UNIT, BLOCK_SIZE, BLOCK_QUERIES, BLOCK_KEYS, BLOCK_RANK, BLOCK_ROPE,
    )  # fmt: skip
    o_rank = tl.arange(0, BLOCK_RANK)
    p_result = p_out + o_place[:, None] * RANK + o_rank[None, :]
    is_stored = is_query[:, None] & (o_rank < RANK)[None, :]
    tl.store(p_result, (acc / total[:, None]).to(p_out.dtype.element_ty), mask=is_stored)


@triton.jit
def _attend_keys(
    p_query,
    o_place,  # [BLOCK_QUERIES]: places of the queries
    is_query,
    o_last,  # [BLOCK_QUERIES]: the last visible key of each query
    p_kv,
    p_keys,
    p_scales,
    p_table,  # [max_blocks] int32: the row's
    base,  # the row's first key
    last_shared,  # all queries see the keys to this one
    end,
    scale,
    i_split,
    NUM_SPLITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Attends to the keys base … end - 1 of split ``i_split`` → sums of latents [BLOCK_QUERIES,
    BLOCK_RANK] relative to 2^top, top and the sums of weights [BLOCK_QUERIES]."""
    o_rank, o_rope = tl.arange(0, BLOCK_RANK)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    p_own = p_query + o_place[:, None] * (RANK + ROPE_DIM)
    b_query = tl.load(p_own + o_rank, mask=is_query[:, None] & (o_rank < RANK), other=0)
    is_rope = is_query[:, None] & (o_rope < ROPE_DIM)
    b_rotated = tl.load(p_own + RANK + o_rope, mask=is_rope, other=0)
    acc = tl.zeros((BLOCK_QUERIES, BLOCK_RANK), tl.float32)
    top = tl.full((BLOCK_QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_QUERIES,), tl.float32)
    tail = max(min(last_shared + 1, end) - base, 0) // BLOCK_KEYS
    own_tail = own_tiles(tail, i_split, NUM_SPLITS, SPLIT_TILES)
    own_end = own_tiles(tl.cdiv(end - base, BLOCK_KEYS), i_split, NUM_SPLITS, SPLIT_TILES)
    for own in tl.range(0, own_tail):
        key = base + place_of_tile(own, i_split, NUM_SPLITS, SPLIT_TILES) * BLOCK_KEYS
        acc, top, total = _attend_tile(
            b_query, b_rotated, o_last, p_kv, p_keys, p_scales, p_table, key, last_shared, end,
            scale, acc, top, total, False, RANK, ROPE_DIM, UNIT, BLOCK_SIZE, BLOCK_KEYS, BLOCK_RANK,
            BLOCK_ROPE,
        )  # fmt: skip
    for own in tl.range(own_tail, own_end):
        key = base + place_of_tile(own, i_split, NUM_SPLITS, SPLIT_TILES) * BLOCK_KEYS
        acc, top, total = _attend_tile(
            b_query, b_rotated, o_last, p_kv, p_keys, p_scales, p_table, key, last_shared, end,
            scale, acc, top, total, True, RANK, ROPE_DIM, UNIT, BLOCK_SIZE, BLOCK_KEYS, BLOCK_RANK,
            BLOCK_ROPE,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def _attend_tile(
    b_query,
    b_rotated,
    o_last,
    p_kv,
    p_keys,
    p_scales,
    p_table,
    key,
    last_shared,
    end,
    scale,
    acc,
    top,
    total,
    IS_EDGE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """Keys key … key + BLOCK_KEYS - 1; all queries see all of them unless IS_EDGE."""
    o_key = key + tl.arange(0, BLOCK_KEYS)
    o_rank, o_rope = tl.arange(0, BLOCK_RANK)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    is_rank, is_rope = o_rank < RANK, o_rope < ROPE_DIM
    if IS_EDGE:
        is_there = o_key < end
        is_rank &= is_there[:, None]
        is_rope &= is_there[:, None]
        b_block = tl.load(p_table + o_key // BLOCK_SIZE, mask=is_there, other=0)
    else:
        b_block = tl.load(p_table + o_key // BLOCK_SIZE)
    o_place = b_block.to(tl.int64) * BLOCK_SIZE + o_key % BLOCK_SIZE
    p_latent = p_kv + o_place[:, None] * (RANK + ROPE_DIM * UNIT)
    b_latent = tl.load(p_latent + o_rank, mask=is_rank, other=0)
    p_key = p_keys + o_place[:, None] * (RANK // UNIT + ROPE_DIM) + RANK // UNIT
    b_key = tl.load(p_key + o_rope, mask=is_rope, other=0)
    if p_scales is not None:
        num_groups: tl.constexpr = (RANK + GROUP - 1) // GROUP
        size: tl.constexpr = min(GROUP, BLOCK_RANK)
        o_group = tl.arange(0, BLOCK_RANK // size)[None, :]
        is_group = o_group < num_groups
        if IS_EDGE:
            is_group &= is_there[:, None]
        p_scale = p_scales + o_place[:, None] * num_groups + o_group
        b_scale = tl.load(p_scale, mask=is_group, other=0)
        if b_latent.dtype != tl.int8:
            b_scale *= E4M3_UNIT
        b_groups = tl.reshape(b_latent, (BLOCK_KEYS, BLOCK_RANK // size, size))
        b_groups = widen(b_groups, tl.float32) * b_scale[:, :, None]
        b_latent = tl.reshape(b_groups.to(b_query.dtype), (BLOCK_KEYS, BLOCK_RANK))

    scores = tl.dot(b_query, tl.trans(b_latent), input_precision="ieee")
    scores = tl.dot(b_rotated, tl.trans(b_key), scores, input_precision="ieee") * scale
    if IS_EDGE:
        is_seen = (o_key[None, :] <= o_last[:, None]) & is_there[None, :]
        scores = tl.where(is_seen, scores, float("-inf"))
        # Hidden keys may be NaN, and NaN times a weight of 0 is NaN.
        is_finite = tl.abs(b_latent.to(tl.float32)) < float("inf")
        b_latent = tl.where((o_key <= last_shared)[:, None] | is_finite, b_latent, 0)
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = new_top
    if IS_EDGE:
        base = tl.where(new_top == float("-inf"), 0, new_top)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(top - base)
    total = total * factor + tl.sum(weights, 1)
    acc = acc * factor[:, None]
    acc = tl.dot(weights.to(b_latent.dtype), b_latent, acc, input_precision="ieee")
    return acc, new_top, total
