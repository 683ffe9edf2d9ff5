"""``linear`` and ``gated`` for few rows, bound by reading the weight once.

A program multiplies some rows of the weight with all tokens. The weight is the left operand, so
that missing tokens waste the 8 columns of tensor cores and not their 16 or 64 rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.codes import Codes
from kernels.codes.triton import Constants, constants, multiply_codes, operands
from kernels.linear.config import Config, codes_config, config
from kernels.programmatic_launch.triton import begin, early
from kernels.silu_mul.triton import multiplied
from kernels.sizes import cdiv


def launch_linear(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    _check(x, weight, residual)
    (num_tokens, size), num_rows = x.shape, weight.shape[0]
    stored, known = operands(weight), constants(weight)
    chosen = _config_of(x, weight, known)
    if residual is not None:
        out = residual  # a program reads its part before it writes there
    elif out is None:
        out = x.new_empty(num_tokens, num_rows, dtype=out_dtype)
    linear_kernel[cdiv(num_rows, chosen.block_rows),](
        *(x, *stored, bias, residual, out, num_tokens),
        *(num_rows, size, stored.weight.stride(0), *known, *chosen[:3]),
        **chosen.options(known),
        **early(),
    )
    return out


def launch_gated(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None,
    deltas: Tensor | None,
    alpha: float,
    beta: float,
) -> Tensor:
    """``deltas`` [T, 2 I] float32 are added before the activation."""
    _check(x, weight, None)
    (num_tokens, size), num_gates = x.shape, weight.shape[0] // 2
    stored, known = operands(weight), constants(weight)
    chosen = _config_of(x, weight, known)
    out = x.new_empty(num_tokens, num_gates)
    gated_kernel[cdiv(2 * num_gates, chosen.block_rows),](
        *(x, *stored, bias, deltas, out, num_tokens),
        *(num_gates, size, stored.weight.stride(0), *known, *chosen[:3], alpha, beta),
        **chosen.options(known),
        **early(),
    )
    return out


def _config_of(x: Tensor, weight: Tensor | Codes, known: Constants) -> Config:
    (num_rows, size), num_tokens = weight.shape, x.shape[0]
    if isinstance(weight, Codes):
        return codes_config(num_rows, size, x.itemsize, num_tokens, known)
    return config(num_rows, size, max(x.itemsize, weight.itemsize), num_tokens)


def _check(x: Tensor, weight: Tensor | Codes, residual: Tensor | None) -> None:
    """Raises ValueError for strides and sizes the kernel cannot read."""
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        raise ValueError("linear: x and residual must be contiguous")
    rows = weight.codes if isinstance(weight, Codes) else weight
    if rows.stride(1) != 1 or x.shape[1] != weight.shape[1] or x.shape[1] % 8:
        raise ValueError(
            f"linear: x {list(x.shape)} and weight {list(weight.shape)} must share their last"
            " size, a multiple of 8, and the weight's rows must be contiguous"
        )


@triton.jit(do_not_specialize=["num_tokens"])
def linear_kernel(
    p_x,  # [T, K]
    p_weight,  # [N, K], or codes [N, K / PER_PLACE]
    p_scales,  # [N, groups], or None if dense
    p_zeros,  # [N, groups] or None
    p_table,  # [16] or None
    p_bias,  # [N] or None
    p_residual,  # [T, N] or None
    p_out,  # [T, N]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # of the weight's rows
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_row = tl.minimum(o_n, N - 1)
    o_t = tl.arange(0, BLOCK_T)
    begin(IS_DEPENDENT)
    b_out = multiply(
        p_x, p_weight, p_scales, p_zeros, p_table, None, o_t, o_t < num_tokens, o_row,
        K, STRIDE, KIND, PER_PLACE, FIRST, GROUP, BLOCK_ROWS, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    is_n = o_n < N
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
    p_weight,  # [2 I, K], or codes [2 I, K / PER_PLACE]
    p_scales,  # [2 I, groups], or None if dense
    p_zeros,  # [2 I, groups] or None
    p_table,  # [16] or None
    p_bias,  # [2 I] or None
    p_deltas,  # [T, 2 I] float32 or None
    p_out,  # [T, I]
    num_tokens,
    I: tl.constexpr,  # noqa: E741
    K: tl.constexpr,
    STRIDE: tl.constexpr,  # of the weight's rows
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Half of a program's rows are gates, the other half their ups."""
    BLOCK_I: tl.constexpr = BLOCK_ROWS // 2
    first = tl.program_id(0) * BLOCK_I
    o_row = tl.arange(0, BLOCK_ROWS)
    o_row = tl.minimum(first + o_row % BLOCK_I, I - 1) + (o_row // BLOCK_I) * I
    o_t = tl.arange(0, BLOCK_T)
    begin(IS_DEPENDENT)
    b_both = multiply(
        p_x, p_weight, p_scales, p_zeros, p_table, None, o_t, o_t < num_tokens, o_row,
        K, STRIDE, KIND, PER_PLACE, FIRST, GROUP, BLOCK_ROWS, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    if p_deltas is not None:
        o_delta = o_t[None, :] * 2 * I + o_row[:, None]
        b_both += tl.load(p_deltas + o_delta, mask=(o_t < num_tokens)[None, :], other=0)
    store_gated(p_bias, p_out, b_both, first, num_tokens, I, BLOCK_I, BLOCK_T, ALPHA, BETA, None)


@triton.jit
def store_gated(
    p_bias,
    p_out,
    b_both,  # [2 BLOCK_I, BLOCK_T]
    first,
    num_tokens,
    I: tl.constexpr,  # noqa: E741
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    o_i = first + tl.arange(0, BLOCK_I)
    o_t = tl.arange(0, BLOCK_T)
    is_i = o_i < I
    b_pairs = tl.permute(tl.reshape(b_both, [2, BLOCK_I, BLOCK_T]), [1, 2, 0])
    b_gate, b_up = tl.split(b_pairs)  # [BLOCK_I, BLOCK_T]
    if p_bias is not None:
        b_gate += tl.load(p_bias + o_i, mask=is_i, other=0).to(tl.float32)[:, None]
        b_up += tl.load(p_bias + I + o_i, mask=is_i, other=0).to(tl.float32)[:, None]
    b_out = multiplied(b_gate, b_up, ALPHA, BETA, LIMIT)
    is_out = is_i[:, None] & (o_t < num_tokens)[None, :]
    o_out = o_t[None, :] * I + o_i[:, None]
    tl.store(p_out + o_out, b_out.to(p_out.dtype.element_ty), mask=is_out)


@triton.jit
def store_squares(
    p_bias,
    p_out,
    b_x,  # [BLOCK_I, BLOCK_T]
    first,
    num_tokens,
    I: tl.constexpr,  # noqa: E741
    BLOCK_I: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """max(x, 0)²"""
    o_i = first + tl.arange(0, BLOCK_I)
    o_t = tl.arange(0, BLOCK_T)
    if p_bias is not None:
        b_x += tl.load(p_bias + o_i, mask=o_i < I, other=0).to(tl.float32)[:, None]
    b_x = tl.where(b_x < 0, 0.0, b_x)  # keeps NaN
    is_out = (o_i < I)[:, None] & (o_t < num_tokens)[None, :]
    o_out = o_t[None, :] * I + o_i[:, None]
    tl.store(p_out + o_out, (b_x * b_x).to(p_out.dtype.element_ty), mask=is_out)


@triton.jit
def multiply(
    p_x,
    p_weight,
    p_scales,
    p_zeros,
    p_table,
    p_order,
    o_token,  # [BLOCK_T], rows of x
    is_token,  # [BLOCK_T]
    o_row,  # [BLOCK_ROWS]
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """weight[o_row] @ x[o_token].T: [BLOCK_ROWS, BLOCK_T] in float32."""
    if KIND == "dense":
        b_out = _multiply_dense(
            p_x, p_weight, o_token, is_token, o_row, K, STRIDE, BLOCK_ROWS, BLOCK_K, BLOCK_T
        )
    else:
        b_out = multiply_codes(
            p_x, p_weight, p_scales, p_zeros, p_table, p_order, o_token, is_token, o_row,
            K, KIND, PER_PLACE, FIRST, GROUP, BLOCK_ROWS, BLOCK_K, BLOCK_T,
        )  # fmt: skip
    return b_out


@triton.jit
def _multiply_dense(
    p_x,
    p_weight,
    o_token,  # [BLOCK_T]
    is_token,  # [BLOCK_T]
    o_row,  # [BLOCK_ROWS]
    K: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    o_k = tl.arange(0, BLOCK_K)
    p_rows = p_weight + o_row.to(tl.int64)[:, None] * STRIDE + o_k[None, :]
    p_tokens = p_x + o_token[None, :] * K + o_k[:, None]
    b_out = tl.zeros([BLOCK_ROWS, BLOCK_T], tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        is_k = o_k < K - start
        b_weight = tl.load(p_rows + start, mask=is_k[None, :], other=0)
        b_x = tl.load(p_tokens + start, mask=is_k[:, None] & is_token[None, :], other=0)
        b_out = tl.dot(b_weight, b_x.to(b_weight.dtype), b_out, input_precision="ieee")
    return b_out
