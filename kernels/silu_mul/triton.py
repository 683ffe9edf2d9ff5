"""``silu_mul`` for many rows: a program takes a piece of one row."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # eight elements, 16 bytes, for each of 128 threads; not measured yet


def launch(gate_up: Tensor) -> Tensor:
    if not gate_up.is_contiguous():
        raise ValueError("silu_mul: gate_up must be contiguous")
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    if num_tokens:
        silu_mul_kernel[num_tokens, triton.cdiv(size, BLOCK)](gate_up, out, size, BLOCK)
    return out


@triton.jit
def silu_mul_kernel(
    p_gate_up,  # [T, 2 SIZE]
    p_out,  # [T, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_size = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_size = o_size < SIZE
    p_gate = p_gate_up + i_token * 2 * SIZE + o_size
    b_gate = tl.load(p_gate, mask=is_size, other=0).to(tl.float32)
    b_up = tl.load(p_gate + SIZE, mask=is_size, other=0).to(tl.float32)
    b_out = silu(b_gate) * b_up
    tl.store(p_out + i_token * SIZE + o_size, b_out.to(p_out.dtype.element_ty), mask=is_size)


@triton.jit
def silu(b_x):
    """Computes SiLU of float32; no exponential overflows."""
    b_small = tl.exp(-tl.abs(b_x))
    return b_x * tl.where(b_x >= 0, 1.0, b_small) / (1 + b_small)
