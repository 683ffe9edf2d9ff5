"""``silu_mul`` for many rows: one program per piece of a row."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.sizes import cdiv

BLOCK = 1024  # eight elements, 16 bytes, for each of 128 threads; not measured yet


def launch(gate_up: Tensor, alpha: float, beta: float, limit: float | None) -> Tensor:
    if not gate_up.is_contiguous():
        raise ValueError("silu_mul: gate_up must be contiguous")
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens:
        grid = num_tokens, cdiv(size, BLOCK)
        silu_mul_kernel[grid](gate_up, out, size, BLOCK, alpha, beta, limit)
    return out


@triton.jit
def silu_mul_kernel(
    p_gate_up,  # [T, 2 SIZE]
    p_out,  # [T, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_size = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_size = o_size < SIZE
    p_gate = p_gate_up + i_token * 2 * SIZE + o_size
    b_gate = tl.load(p_gate, mask=is_size, other=0).to(tl.float32)
    b_up = tl.load(p_gate + SIZE, mask=is_size, other=0).to(tl.float32)
    b_out = multiplied(b_gate, b_up, ALPHA, BETA, LIMIT)
    tl.store(p_out + i_token * SIZE + o_size, b_out.to(p_out.dtype.element_ty), mask=is_size)


@triton.jit
def multiplied(b_gate, b_up, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """act(gate) * up, clamped if there is a LIMIT."""
    if LIMIT is not None:
        b_gate = tl.where(b_gate > LIMIT, LIMIT, b_gate)  # keeps NaN
        b_up = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up)) + 1
    return opened(b_gate, ALPHA, BETA) * b_up


@triton.jit
def opened(b_x, ALPHA: tl.constexpr, BETA: tl.constexpr):
    """x · σ(ALPHA x + BETA x³) in float32, without overflow."""
    if BETA == 0:
        b_small = tl.exp(-tl.abs(b_x * ALPHA))
    else:
        b_small = tl.exp(-tl.abs(b_x * (ALPHA + BETA * b_x * b_x)))
    return b_x * tl.where(b_x >= 0, 1.0, b_small) / (1 + b_small)
