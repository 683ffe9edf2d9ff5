"""Adds up the outputs of a token's experts in the order of choice. One program per piece of a
token."""

import triton
import triton.language as tl

BLOCK = 1024  # eight elements, 16 bytes, for each of 128 threads; not measured yet


@triton.jit
def sum_kernel(
    p_parts,  # [T, NUM_CHOSEN, N]
    p_residual,  # [T, N] or None
    p_out,  # [T, N]
    NUM_CHOSEN: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_n = o_n < N
    b_out = tl.zeros([BLOCK], tl.float32)
    if p_residual is not None:
        b_out += tl.load(p_residual + i_token * N + o_n, mask=is_n, other=0).to(tl.float32)
    for i in tl.static_range(NUM_CHOSEN):
        p_part = p_parts + (i_token * NUM_CHOSEN + i) * N
        b_out += tl.load(p_part + o_n, mask=is_n, other=0).to(tl.float32)
    tl.store(p_out + i_token * N + o_n, b_out.to(p_out.dtype.element_ty), mask=is_n)
