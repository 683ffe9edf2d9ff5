"""``linear`` and ``gated`` for few rows, bound by reading the weight once.

A program multiplies some rows of the weight with all tokens. The weight is the left operand, so
that tensor cores waste their 8 columns on missing tokens and not their 16 or 64 rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.rms_norm import Norm
from kernels.silu_mul.triton import silu


class Config(NamedTuple):
    block_rows: int  # rows of the weight in a program
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int


def config(num_rows: int, size: int, itemsize: int, num_tokens: int) -> Config:
    """For a weight [num_rows, size]. None of it is measured yet.

    Everything that orders a sum depends on the weight alone, so that a token's result is the same
    bits whatever its step has besides. ``block_rows``: enough programs for 132 processors, at least
    one each. ``block_k``: 256 bytes of each row at a time; float32 has no tensor cores, and its
    operands stand in registers. ``num_stages``: some 100 KB, so that two programs share a
    processor, each with 40 KB or more on the way.
    """
    block_rows = 64 if num_rows >= 16384 else 32 if num_rows >= 2048 else 16
    block_k = min(128 if itemsize == 2 else 32, triton.next_power_of_2(size))
    block_t = max(16, triton.next_power_of_2(num_tokens))
    stage_bytes = (block_rows + block_t) * block_k * itemsize
    num_stages = max(3, min(8, (100 << 10) // stage_bytes))
    num_warps = 4 if block_t < 64 else 8  # with 4, registers spill
    return Config(block_rows, block_k, block_t, num_warps, num_stages)


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    _check(x, weight, residual)
    num_tokens, size, num_rows = *x.shape, len(weight)
    chosen = config(num_rows, size, weight.element_size(), num_tokens)
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=out_dtype, device=x.device)
    norm_weight, eps = norm or (None, 0.0)
    linear_kernel[triton.cdiv(num_rows, chosen.block_rows),](
        *(x, weight, bias, norm_weight, residual, out, eps, num_tokens),
        *(num_rows, size, weight.stride(0), *chosen[:3]),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out


def launch_gated(x: Tensor, norm: Norm | None, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight, None)
    norm_weight, eps = norm or (None, 0.0)
    num_tokens, size, num_gates = *x.shape, len(weight) // 2
    chosen = config(len(weight), size, weight.element_size(), num_tokens)
    out = x.new_empty(num_tokens, num_gates)
    gated_kernel[triton.cdiv(2 * num_gates, chosen.block_rows),](
        *(x, weight, bias, norm_weight, out, eps, num_tokens),
        *(num_gates, size, weight.stride(0), *chosen[:3]),
        num_warps=chosen.num_warps,
        num_stages=chosen.num_stages,
    )
    return out


def _check(x: Tensor, weight: Tensor, residual: Tensor | None) -> None:
    """Raises ValueError."""
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        raise ValueError("linear: x and residual must be contiguous")
    if weight.stride(1) != 1 or x.shape[1] != weight.shape[1] or x.shape[1] % 8:
        raise ValueError(
            f"linear: x {list(x.shape)} and weight {list(weight.shape)} must share their last"
            " size, a multiple of 8, and the weight's rows must be contiguous"
        )


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    p_x,  # [T, K]
    p_weight,  # [N, K]
    p_bias,  # [N] or None
    p_norm,  # [K] or None
    p_residual,  # [T, N] or None
    p_out,  # [T, N]
    eps,
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # of the weight's rows
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_t = tl.arange(0, BLOCK_T)
    is_n = o_n < N
    b_out = _multiply(
        p_x, p_weight, p_norm, eps, num_tokens, tl.minimum(o_n, N - 1),
        K, STRIDE, BLOCK_ROWS, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    is_out = is_n[:, None] & (o_t < num_tokens)[None, :]
    o_out = o_t[None, :] * N + o_n[:, None]
    if p_bias is not None:
        b_out += tl.load(p_bias + o_n, mask=is_n, other=0).to(tl.float32)[:, None]
    if p_residual is not None:
        b_out += tl.load(p_residual + o_out, mask=is_out, other=0).to(tl.float32)
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["num_tokens"])
def gated_kernel(
    p_x,  # [T, K]
    p_weight,  # [2 I, K]
    p_bias,  # [2 I] or None
    p_norm,  # [K] or None
    p_out,  # [T, I]
    eps,
    num_tokens,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # of the weight's rows
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Half of a program's rows are gates, and the other half their ups."""
    BLOCK_I: tl.constexpr = BLOCK_ROWS // 2
    first = tl.program_id(0) * BLOCK_I
    o_row = tl.arange(0, BLOCK_ROWS)
    o_gate = tl.minimum(first + o_row % BLOCK_I, I - 1)
    b_both = _multiply(
        p_x, p_weight, p_norm, eps, num_tokens, o_gate + (o_row // BLOCK_I) * I,
        K, STRIDE, BLOCK_ROWS, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    if p_bias is not None:
        b_both += tl.load(p_bias + o_gate + (o_row // BLOCK_I) * I).to(tl.float32)[:, None]
    b_pairs = tl.permute(tl.reshape(b_both, [2, BLOCK_I, BLOCK_T]), [1, 2, 0])
    b_gate, b_up = tl.split(b_pairs)  # [BLOCK_I, BLOCK_T]
    b_out = silu(b_gate) * b_up
    o_i = first + tl.arange(0, BLOCK_I)
    o_t = tl.arange(0, BLOCK_T)
    is_out = (o_i < I)[:, None] & (o_t < num_tokens)[None, :]
    o_out = o_t[None, :] * I + o_i[:, None]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=is_out)


@triton.jit
def _multiply(
    p_x,
    p_weight,
    p_norm,
    eps,
    num_tokens,
    o_row,  # [BLOCK_ROWS]
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Rows of the weight with all tokens, normed if ``p_norm``: [BLOCK_ROWS, BLOCK_T] float32."""
    o_k = tl.arange(0, BLOCK_K)
    o_t = tl.arange(0, BLOCK_T)
    p_rows = p_weight + o_row.to(tl.int64)[:, None] * STRIDE + o_k[None, :]
    p_tokens = p_x + o_t[None, :] * K + o_k[:, None]
    is_token = (o_t < num_tokens)[None, :]
    b_out = tl.zeros([BLOCK_ROWS, BLOCK_T], tl.float32)
    b_squares = tl.zeros([BLOCK_K, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        is_k = o_k < K - start
        b_weight = tl.load(p_rows + start, mask=is_k[None, :], other=0)
        b_x = tl.load(p_tokens + start, mask=is_k[:, None] & is_token, other=0)
        if p_norm is not None:
            b_norm = tl.load(p_norm + start + o_k, mask=is_k, other=0).to(tl.float32)
            b_wide = b_x.to(tl.float32)
            b_squares += b_wide * b_wide
            b_x = (b_wide * b_norm[:, None]).to(b_weight.dtype)
        b_out = tl.dot(b_weight, b_x.to(b_weight.dtype), b_out, input_precision="ieee")
    if p_norm is not None:
        b_out *= tl.rsqrt(tl.sum(b_squares, 0) / K + eps)[None, :]
    return b_out
