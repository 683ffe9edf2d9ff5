"""``attend`` as kernels: the keys of decode rows are divided among splits, chunks are cut into
tiles.

A row's result does not depend on other rows. Its tiles begin at its first visible key, so only a
window needs a mask at the beginning. Tiles and splits have the same boundaries for every token: the
order of summing does not depend on the position of the row's first token or on the number of
tokens. Tiles without visible keys are not read.
"""

from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import switches
from kernels.paged_attention.device import TILE, ChunkRows, DecodeRows, DeviceAttention
from kernels.paged_attention.grouped import PLAIN, AttentionOptions
from kernels.paged_attention.triton import latent
from kernels.paged_attention.triton.chunk import chunk_kernel
from kernels.paged_attention.triton.decode import decode_kernel
from kernels.paged_attention.triton.tiles import EXACT, LOG2_E, MAX_REGISTERS
from kernels.programmatic_launch.triton import early
from kernels.sizes import cdiv, next_power_of_2

# With batch 1 and 8 KV heads, 16 splits are 128 programs, about as many as an H200 has
# multiprocessors.
NUM_SPLITS = 16
# Rows of queries of a decoding program: a tensor core needs 16, and beyond 64 it gets slow.
MIN_QUERIES, MAX_QUERIES = 16, 64
MIN_DIM = 16  # head size of a tensor-core GEMM
# Block numbers are loaded two stages before their keys, which are in flight for two more.
NUM_STAGES = 5
SHARED_REGISTERS = 168  # per thread, for three programs of four warps on a multiprocessor


class Config(NamedTuple):
    num_queries: int  # rows of a program's GEMM: tokens × heads that share keys, or tokens
    num_keys: int  # of a tile
    num_warps: int
    num_stages: int = NUM_STAGES
    max_registers: int = MAX_REGISTERS  # of a thread


class Cache(NamedTuple):
    """Quantized if there are scales."""

    numbers: Tensor
    scales: Tensor | None


def decode_config(
    num_queries: int, head_dim: int, dtype: torch.dtype, num_rows: int, *, has_codes: bool = False
) -> Config:
    """``num_queries``: tokens of a row × heads that share a KV head. More warps where registers
    would spill; float32 GEMMs have no tensor cores and take many registers, and so do quantized
    keys.

    From two rows on, three programs per multiprocessor are faster than two with deep pipelines: 26
    % at 128 rows of 640 keys, 5 % at 32 of 4,096 (H100,
    ``benchmarks/results/gpu-sweeps-nvidia-h100-2026-11-26.md``). Both give the same bits.
    """
    if dtype == torch.float32:
        return Config(MIN_QUERIES, 16, 4 if head_dim <= 128 and not has_codes else 8)
    block = min(max(next_power_of_2(num_queries), MIN_QUERIES), MAX_QUERIES)
    if block > MIN_QUERIES or head_dim > 128 or has_codes:
        return Config(block, 64 if head_dim <= 128 else 32, 8)
    if num_rows == 1:
        return Config(block, 64, 4)
    return Config(block, 64, 4, num_stages=2, max_registers=SHARED_REGISTERS)


def chunk_config(head_dim: int, dtype: torch.dtype, *, has_codes: bool = False) -> Config:
    """Unmeasured: the largest GEMMs whose registers do not spill."""
    if dtype == torch.float32:
        return Config(16, 16, 4 if head_dim <= 128 and not has_codes else 8)
    if has_codes:
        return Config(64, 64, 8) if head_dim <= 128 else Config(32, 32, 8)
    return Config(TILE, 64, 8) if head_dim <= 128 else Config(64, 32, 8)


def attend(
    query: Tensor,
    kv_cache: Tensor,
    attention: DeviceAttention,
    scale: float,
    options: AttentionOptions = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    cache = Cache(kv_cache, kv_scales)
    is_latent = kv_cache.shape[2] == 1
    stored = [each if is_latent else each[0] for each in cache if each is not None]
    if not all(each.is_contiguous() for each in (query, *stored)):
        raise ValueError("attend takes contiguous queries, and caches with contiguous blocks")
    out = query.new_empty(*query.shape[:2], options.value_dim or query.shape[2])
    decode, chunks = attention.decode, attention.chunks
    if _is_out_of_reach(options.window, attention):
        options = options._replace(window=None)
    num_decoded = 0 if decode is None else decode.num_tokens
    if is_latent:
        _attend_latents(out, query, cache, attention, scale, options)
        return out
    if decode is not None:
        tokens = out[:num_decoded], query[:num_decoded]
        _decode(*tokens, cache, decode, attention.tables, scale, options)
    if chunks is not None:
        _attend_chunks(out, query, cache, chunks, attention.tables, scale, options)
    return out


def _attend_latents(
    out: Tensor,
    query: Tensor,
    cache: Cache,
    attention: DeviceAttention,
    scale: float,
    options: AttentionOptions,
) -> None:
    if options._replace(value_dim=None) != PLAIN or cache.numbers.shape[3] != 1:
        raise ValueError("attention to latents takes one KV head and no options")
    decode, chunks = attention.decode, attention.chunks
    num_decoded = 0 if decode is None else decode.num_tokens
    if decode is not None:
        tokens = out[:num_decoded], query[:num_decoded]
        latent.decode(*tokens, *cache, decode, attention.tables, scale)
    if chunks is not None:
        latent.attend_chunks(out, query, *cache, chunks, attention.tables, scale)


def _is_out_of_reach(window: int | None, attention: DeviceAttention) -> bool:
    """True if the window is at least as long as a row can be. Shoal's own models drop such windows
    at load; transformers' models keep them."""
    return bool(window and window >= attention.tables.shape[1] * attention.block_size)


def _decode(
    out: Tensor,
    query: Tensor,
    cache: Cache,
    rows: DecodeRows,
    tables: Tensor,
    scale: float,
    options: AttentionOptions,
) -> None:
    """query [B * width, H, D], out [B * width, H, value_dim]."""
    num_tokens, num_heads, value_dim = out.shape
    block_size, _, num_kv_heads = cache.numbers.shape[1:4]
    if len(rows.arrivals) < len(rows.slots) * num_kv_heads:
        raise ValueError(
            f"attend takes one arrival per row and KV head: {len(rows.arrivals)} are fewer than"
            f" {len(rows.slots)} × {num_kv_heads}"
        )
    num_queries = rows.width * (num_heads // num_kv_heads)
    widest = max(query.shape[2], value_dim)
    num_rows, has_codes = len(rows.slots), cache.scales is not None
    config = decode_config(num_queries, widest, query.dtype, num_rows, has_codes=has_codes)
    num_tiles = cdiv(num_queries, config.num_queries)
    shape = (num_tokens, num_heads, NUM_SPLITS)
    partials = torch.empty(*shape, value_dim, dtype=torch.float32, device=query.device)
    weights = torch.empty(shape, dtype=torch.float32, device=query.device)
    decode_kernel[(num_kv_heads, NUM_SPLITS, num_rows * num_tiles)](
        query,
        *cache,
        rows.slots,
        tables,
        tables.stride(0),
        rows.starts,
        rows.first_keys,
        tables.shape[1] * block_size,
        scale * LOG2_E.value,
        partials,
        weights,
        rows.arrivals,
        options.sinks,
        out,
        **_sizes(query, cache, value_dim),
        WIDTH=rows.width,
        NUM_HEADS=num_heads,
        WINDOW=options.window,
        SOFTCAP=options.softcap,
        NUM_SPLITS=NUM_SPLITS,
        SPLIT_TILES=max(1, switches.SPLIT_KEYS // config.num_keys),
        NUM_TILES=num_tiles,
        BLOCK_QUERIES=config.num_queries,
        BLOCK_KEYS=config.num_keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        maxnreg=config.max_registers,
        **EXACT,
        **early(),
    )


def _attend_chunks(
    out: Tensor,
    query: Tensor,
    cache: Cache,
    chunks: ChunkRows,
    tables: Tensor,
    scale: float,
    options: AttentionOptions,
) -> None:
    """Computes the chunks' tokens: query [T, H, D], out [T, H, value_dim]."""
    _, num_heads, value_dim = out.shape
    widest, has_codes = max(query.shape[2], value_dim), cache.scales is not None
    config = chunk_config(widest, query.dtype, has_codes=has_codes)
    num_shared = num_heads_together(num_heads, cache.numbers.shape[3])
    num_parts = TILE * num_shared // config.num_queries
    chunk_kernel[(len(chunks.tile_rows) * num_parts, num_heads // num_shared)](
        query,
        *cache,
        chunks.slots,
        tables,
        tables.stride(0),
        chunks.starts,
        chunks.first_keys,
        tables.shape[1] * cache.numbers.shape[1],
        chunks.ends,
        chunks.token_starts,
        chunks.tile_rows,
        chunks.tile_starts,
        scale * LOG2_E.value,
        options.sinks,
        out,
        **_sizes(query, cache, value_dim),
        NUM_HEADS=num_heads,
        WINDOW=options.window,
        SOFTCAP=options.softcap,
        NUM_SHARED=num_shared,
        NUM_PARTS=num_parts,
        BLOCK_QUERIES=config.num_queries,
        BLOCK_KEYS=config.num_keys,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **EXACT,
    )


def num_heads_together(num_heads: int, num_kv_heads: int) -> int:
    """The number of heads of one KV head that a chunk's program computes."""
    return gcd(num_heads // num_kv_heads, switches.PROMPT_HEADS)


def _sizes(query: Tensor, cache: Cache, value_dim: int) -> dict[str, Any]:
    """Compile-time sizes of queries, values and the cache's entries."""
    block_size, _, num_kv_heads, cache_dim = cache.numbers.shape[1:]
    head_dim = query.shape[2]
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": cache.numbers.stride(0),
        "SCALES_STRIDE": 0 if cache.scales is None else cache.scales.stride(0),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "CACHE_DIM": cache_dim,
        "BLOCK_DIM": max(MIN_DIM, next_power_of_2(head_dim)),
        "BLOCK_VALUE": max(MIN_DIM, next_power_of_2(value_dim)),
    }
