"""``rms_norm``: one program per row."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.programmatic_launch.triton import begin, early
from kernels.sizes import next_power_of_2

ROW_BYTES_PER_WARP = 2048  # 64 bytes a thread, four loads of 16; not measured yet


def launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = x.contiguous()
    out = torch.empty_like(rows)
    size = rows.shape[-1]
    if num_rows := rows.numel() // size:
        block, num_warps = config(size, rows.itemsize)
        rms_norm_kernel[num_rows,](
            rows, weight, out, eps, size, block, num_warps=num_warps, **early()
        )
    return out


@cache
def config(size: int, itemsize: int) -> tuple[int, int]:
    """The block for a row, and the warps of its program."""
    block = next_power_of_2(size)
    return block, max(1, min(block * itemsize // ROW_BYTES_PER_WARP, 8))


@triton.jit
def rms_norm_kernel(
    p_x,  # [T, SIZE]
    p_weight,  # [SIZE]
    p_out,  # [T, SIZE]
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    begin(IS_DEPENDENT)
    o_row = tl.program_id(0).to(tl.int64) * SIZE
    o_size = tl.arange(0, BLOCK)
    is_size = o_size < SIZE
    b_x = tl.load(p_x + o_row + o_size, mask=is_size, other=0).to(tl.float32)
    b_weight = tl.load(p_weight + o_size, mask=is_size, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / SIZE + eps)
    b_out = b_x * scale * b_weight
    tl.store(p_out + o_row + o_size, b_out.to(p_out.dtype.element_ty), mask=is_size)
