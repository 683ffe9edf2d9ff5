"""``inner_products`` and ``add_deltas``: programs of rows without an adapter return at once."""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adapt.bank import BLOCK_OUTPUTS, SPLIT_INPUTS, AdapterRows, Bank
from kernels.paged_attention import TILE
from kernels.sizes import cdiv, next_power_of_2

CHUNK_TOKENS = 32  # of a chunk in a program; divides TILE
MIN_TOKENS = 16  # of tensor cores


def block_k(itemsize: int, rank: int) -> int:
    """float32 has no tensor cores, and its operands stay in registers."""
    most, numbers = (128, 16384) if itemsize == 2 else (32, 4096)
    return max(16, min(most, numbers // rank))


def num_warps_of(rank: int) -> int:
    return 4 if rank < 128 else 8


def launch_inner(x: Tensor, bank: Bank, rows: AdapterRows) -> Tensor:
    x = x.contiguous()
    _, rank, num_parts, size = bank.a.shape
    out = x.new_empty(bank.num_splits, num_parts, len(x), rank, dtype=torch.float32)
    block = block_k(x.element_size(), rank)
    for num, given, options in _launches(rows):
        inner_kernel[num, num_parts, bank.num_splits](
            *(x, bank.a, out, rows.of_slots, *given, len(x), *bank.a.stride()[:2]),
            K=size,
            RANK=rank,
            SPLIT=min(SPLIT_INPUTS, cdiv(size, block) * block),
            BLOCK_K=block,
            num_warps=num_warps_of(rank),
            **options,
        )
    return out


def launch_deltas(y: Tensor, inner: Tensor, bank: Bank, rows: AdapterRows, scale: float) -> None:
    if not y.is_contiguous():
        raise ValueError("add_deltas: y must be contiguous")
    num_splits, num_parts, num_tokens, rank = inner.shape
    for num, given, options in _launches(rows):
        deltas_kernel[num, len(bank.blocks)](
            *(y, inner, bank.b, bank.blocks, rows.of_slots, *given, num_tokens),
            *(*bank.b.stride()[:2], scale),
            N=y.shape[1],
            NUM_SPLITS=num_splits,
            NUM_PARTS=num_parts,
            RANK=rank,
            BLOCK_N=BLOCK_OUTPUTS,
            num_warps=num_warps_of(rank),
            **options,
        )


def _launches(rows: AdapterRows) -> Iterator[tuple[int, tuple[Tensor | None, ...], dict[str, Any]]]:
    """The programs, tensors and options of decode rows and of chunks."""
    if rows.decode is not None and len(rows.decode.slots):
        decode = rows.decode
        block = max(MIN_TOKENS, next_power_of_2(decode.width))
        options = {"WIDTH": decode.width, "PER_TILE": 1, "BLOCK_T": block}
        yield len(decode.slots), (decode.slots, None, None, None), options
    if rows.chunks is not None:
        chunks = rows.chunks
        per_tile = TILE // CHUNK_TOKENS
        options = {"WIDTH": TILE, "PER_TILE": per_tile, "BLOCK_T": CHUNK_TOKENS}
        tables = chunks.slots, chunks.token_starts, chunks.tile_rows, chunks.tile_starts
        yield len(chunks.tile_rows) * per_tile, tables, options


@triton.jit
def row_tokens(
    p_of_slots,
    p_slots,
    p_token_starts,
    p_tile_rows,
    p_tile_starts,
    WIDTH: tl.constexpr,
    PER_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The adapter of a program's row, its first token, and the number of tokens from there on."""
    i_row = tl.program_id(0)
    if p_tile_rows is None:
        first = i_row * WIDTH
        num = WIDTH
    else:
        i_tile = i_row // PER_TILE
        start = tl.load(p_tile_starts + i_tile) + i_row % PER_TILE * BLOCK_T
        i_row = tl.load(p_tile_rows + i_tile)
        first = tl.load(p_token_starts + i_row) + start
        num = tl.load(p_token_starts + i_row + 1) - first
    adapter = tl.load(p_of_slots + tl.load(p_slots + i_row))
    return adapter, first, num


@triton.jit(do_not_specialize=["num_tokens"])
def inner_kernel(
    p_x,  # [T, K]
    p_a,  # [L, RANK, P, K]
    p_out,  # [S, P, T, RANK] float32
    p_of_slots,  # [slots] int32
    p_slots,  # [rows] int32
    p_token_starts,  # [rows + 1] int32, or None for decode rows
    p_tile_rows,  # [tiles] int32 or None
    p_tile_starts,  # [tiles] int32 or None
    num_tokens,
    stride,  # of adapters in a
    rank_stride,
    K: tl.constexpr,
    RANK: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    adapter, first, num = row_tokens(
        p_of_slots, p_slots, p_token_starts, p_tile_rows, p_tile_starts, WIDTH, PER_TILE, BLOCK_T
    )
    if adapter < 0 or num <= 0:
        return
    i_part, i_split = tl.program_id(1), tl.program_id(2)
    o_rank = tl.arange(0, RANK)
    o_k = i_split * SPLIT + tl.arange(0, BLOCK_K)
    o_t = tl.arange(0, BLOCK_T)
    o_token = first.to(tl.int64) + o_t
    is_token = o_t < num
    p_rows = p_a + adapter.to(tl.int64) * stride + i_part * K
    p_rows += o_rank[:, None].to(tl.int64) * rank_stride
    p_tokens = p_x + o_token[None, :] * K
    b_out = tl.zeros([RANK, BLOCK_T], tl.float32)
    for start in tl.range(0, SPLIT, BLOCK_K):
        o_in = start + o_k
        is_k = o_in < K
        b_a = tl.load(p_rows + o_in[None, :], mask=is_k[None, :], other=0)
        b_x = tl.load(p_tokens + o_in[:, None], mask=is_k[:, None] & is_token[None, :], other=0)
        b_out = tl.dot(b_a, b_x.to(b_a.dtype), b_out, input_precision="ieee")
    i_sum = (i_split * tl.num_programs(1) + i_part).to(tl.int64)
    o_out = (i_sum * num_tokens + o_token)[None, :] * RANK + o_rank[:, None]
    tl.store(p_out + o_out, b_out, mask=is_token[None, :])


@triton.jit(do_not_specialize=["num_tokens", "scale"])
def deltas_kernel(
    p_y,  # [T, N]
    p_inner,  # [S, P, T, RANK] float32
    p_b,  # [L, RANK, N]
    p_blocks,  # [blocks, 3] int32
    p_of_slots,  # [slots] int32
    p_slots,  # [rows] int32
    p_token_starts,  # [rows + 1] int32, or None for decode rows
    p_tile_rows,  # [tiles] int32 or None
    p_tile_starts,  # [tiles] int32 or None
    num_tokens,
    stride,  # of adapters in b
    rank_stride,
    scale,
    N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDTH: tl.constexpr,
    PER_TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    adapter, first, num = row_tokens(
        p_of_slots, p_slots, p_token_starts, p_tile_rows, p_tile_starts, WIDTH, PER_TILE, BLOCK_T
    )
    if adapter < 0 or num <= 0:
        return
    p_block = p_blocks + tl.program_id(1) * 3
    i_part = tl.load(p_block).to(tl.int64)
    o_n = tl.load(p_block + 1) + tl.arange(0, BLOCK_N)
    is_n = o_n < tl.load(p_block + 2)
    o_rank = tl.arange(0, RANK)
    o_t = tl.arange(0, BLOCK_T)
    o_token = first.to(tl.int64) + o_t
    is_token = o_t < num
    p_sums = p_inner + (i_part * num_tokens + o_token)[None, :] * RANK + o_rank[:, None]
    b_inner = tl.zeros([RANK, BLOCK_T], tl.float32)
    for _ in tl.range(0, NUM_SPLITS):
        b_inner += tl.load(p_sums, mask=is_token[None, :], other=0)
        p_sums += NUM_PARTS * num_tokens * RANK
    p_rows = p_b + adapter.to(tl.int64) * stride + o_n[:, None]
    p_rows += o_rank[None, :].to(tl.int64) * rank_stride
    b_b = tl.load(p_rows, mask=is_n[:, None], other=0)
    b_delta = tl.dot(b_b, b_inner.to(b_b.dtype), input_precision="ieee") * scale
    o_y = o_token[None, :] * N + o_n[:, None]
    is_y = is_n[:, None] & is_token[None, :]
    b_y = tl.load(p_y + o_y, mask=is_y, other=0).to(tl.float32) + b_delta
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=is_y)
