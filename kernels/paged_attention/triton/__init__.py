"""``attend`` as kernels: the keys of decode rows are divided among splits, chunks are cut into
tiles.

A row's result does not depend on other rows. Its tiles begin at its first visible key, so only a
window needs a mask at the beginning. Tiles and splits have the same boundaries for every token: the
order of summing does not depend on the position of the row's first token or on the number of
tokens. Tiles without visible keys are not read.
"""

from functools import cache
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
from kernels.sizes import cdiv, has_contiguous_blocks, next_power_of_2

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


class Tensors(NamedTuple):
    query: Tensor  # [T, H, D]
    kv_cache: Tensor
    kv_scales: Tensor | None
    sinks: Tensor | None
    out: Tensor  # [T, H, value_dim]


class Shape(NamedTuple):
    """The sizes of a layer's attention. ``entries`` [num_blocks + 1, block_size, 2, H_kv, D] are
    quantized if there is a distance between the blocks' scales."""

    num_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    entries: torch.Size
    block_stride: int
    scales_stride: int
    window: int | None
    softcap: float | None

    @property
    def has_codes(self) -> bool:
        return self.scales_stride > 0

    @property
    def num_kv_heads(self) -> int:
        return self.entries[3]

    @property
    def widest(self) -> int:
        return max(self.head_dim, self.value_dim)


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
    is_latent = kv_cache.shape[2] == 1
    is_readable = Tensor.is_contiguous if is_latent else has_contiguous_blocks
    caches = (kv_cache,) if kv_scales is None else (kv_cache, kv_scales)
    if not query.is_contiguous() or not all(map(is_readable, caches)):
        raise ValueError("attend takes contiguous queries, and caches with contiguous blocks")
    num_tokens, num_heads, head_dim = query.shape
    value_dim = options.value_dim or head_dim
    out = query.new_empty(num_tokens, num_heads, value_dim)
    tensors = Tensors(query, kv_cache, kv_scales, options.sinks, out)
    if is_latent:
        _attend_latents(tensors, attention, scale, options)
        return out
    shape = Shape(
        num_heads,
        head_dim,
        value_dim,
        query.dtype,
        kv_cache.shape,
        kv_cache.stride(0),
        0 if kv_scales is None else kv_scales.stride(0),
        None if _is_out_of_reach(options.window, attention) else options.window,
        options.softcap,
    )
    if attention.decode is not None:
        _decode(shape, tensors, attention.decode, attention.tables, scale)
    if attention.chunks is not None:
        _attend_chunks(shape, tensors, attention.chunks, attention.tables, scale)
    return out


def _attend_latents(
    tensors: Tensors, attention: DeviceAttention, scale: float, options: AttentionOptions
) -> None:
    query, kv_cache, kv_scales, _, out = tensors
    if options._replace(value_dim=None) != PLAIN or kv_cache.shape[3] != 1:
        raise ValueError("attention to latents takes one KV head and no options")
    given, tables = (out, query, kv_cache, kv_scales), attention.tables
    if attention.decode is not None:
        latent.decode(*given, attention.decode, tables, scale)
    if attention.chunks is not None:
        latent.attend_chunks(*given, attention.chunks, tables, scale)


def _is_out_of_reach(window: int | None, attention: DeviceAttention) -> bool:
    """True if the window is at least as long as a row can be. Shoal's own models drop such windows
    at load; transformers' models keep them."""
    return bool(window and window >= attention.tables.shape[1] * attention.block_size)


def _decode(shape: Shape, tensors: Tensors, rows: DecodeRows, tables: Tensor, scale: float) -> None:
    """Computes the first B * width tokens."""
    num_rows, width = rows.slots.shape[0], rows.width
    if rows.arrivals.shape[0] < num_rows * shape.num_kv_heads:
        raise ValueError(
            f"attend takes one arrival per row and KV head: {len(rows.arrivals)} are fewer than"
            f" {num_rows} × {shape.num_kv_heads}"
        )
    num_tiles, known = _decode_constants(
        shape, width, num_rows == 1, (NUM_SPLITS, switches.SPLIT_KEYS)
    )
    parts = num_rows * width, shape.num_heads, NUM_SPLITS
    decode_kernel[shape.num_kv_heads, NUM_SPLITS, num_rows * num_tiles](
        *tensors[:3],
        rows.slots,
        tables,
        tables.stride(0),
        rows.starts,
        rows.first_keys,
        tables.shape[1] * shape.entries[1],
        scale * LOG2_E.value,
        tensors.out.new_empty(*parts, shape.value_dim, dtype=torch.float32),
        tensors.out.new_empty(parts, dtype=torch.float32),
        rows.arrivals,
        *tensors[3:],
        **known,
        **early(),
    )


@cache
def _decode_constants(
    shape: Shape, width: int, is_one: bool, splits: tuple[int, int]
) -> tuple[int, dict[str, Any]]:
    """The tiles of a row's queries, and all constants of a launch for one row or for more.
    ``splits``: their number, and the keys of a turn."""
    num_queries = width * (shape.num_heads // shape.num_kv_heads)
    config = decode_config(
        num_queries, shape.widest, shape.dtype, 1 if is_one else 2, has_codes=shape.has_codes
    )
    num_tiles = cdiv(num_queries, config.num_queries)
    return num_tiles, _constants(shape, config) | {
        "WIDTH": width,
        "NUM_SPLITS": splits[0],
        "SPLIT_TILES": max(1, splits[1] // config.num_keys),
        "NUM_TILES": num_tiles,
        "maxnreg": config.max_registers,
    }


def _attend_chunks(
    shape: Shape, tensors: Tensors, chunks: ChunkRows, tables: Tensor, scale: float
) -> None:
    """Computes the chunks' tokens."""
    num_parts, num_groups, known = _chunk_constants(shape, switches.PROMPT_HEADS)
    chunk_kernel[chunks.tile_rows.shape[0] * num_parts, num_groups](
        *tensors[:3],
        chunks.slots,
        tables,
        tables.stride(0),
        chunks.starts,
        chunks.first_keys,
        tables.shape[1] * shape.entries[1],
        chunks.ends,
        chunks.token_starts,
        chunks.tile_rows,
        chunks.tile_starts,
        scale * LOG2_E.value,
        *tensors[3:],
        **known,
    )


@cache
def _chunk_constants(shape: Shape, prompt_heads: int) -> tuple[int, int, dict[str, Any]]:
    """The programs for a tile and a KV head's share of them, and all constants of a launch."""
    config = chunk_config(shape.widest, shape.dtype, has_codes=shape.has_codes)
    num_shared = num_heads_together(shape.num_heads, shape.num_kv_heads)
    num_parts = TILE * num_shared // config.num_queries
    known = {"NUM_SHARED": num_shared, "NUM_PARTS": num_parts}
    return num_parts, shape.num_heads // num_shared, _constants(shape, config) | known


def num_heads_together(num_heads: int, num_kv_heads: int) -> int:
    """The number of heads of one KV head that a chunk's program computes."""
    return gcd(num_heads // num_kv_heads, switches.PROMPT_HEADS)


def _constants(shape: Shape, config: Config) -> dict[str, Any]:
    """Compile-time constants and options of both kernels."""
    _, block_size, _, num_kv_heads, cache_dim = shape.entries
    return {
        "WINDOW": shape.window,
        "SOFTCAP": shape.softcap,
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": shape.block_stride,
        "SCALES_STRIDE": shape.scales_stride,
        "HEAD_DIM": shape.head_dim,
        "VALUE_DIM": shape.value_dim,
        "CACHE_DIM": cache_dim,
        "BLOCK_QUERIES": config.num_queries,
        "BLOCK_KEYS": config.num_keys,
        "BLOCK_DIM": max(MIN_DIM, next_power_of_2(shape.head_dim)),
        "BLOCK_VALUE": max(MIN_DIM, next_power_of_2(shape.value_dim)),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **EXACT,
    }
