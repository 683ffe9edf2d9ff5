"""A kernel that only reads memory."""

import triton
import triton.language as tl
from torch import Tensor


def launch(values: Tensor, sums: Tensor, block: int, num_warps: int) -> None:
    """values [N] int32, N a multiple of ``block``; sums [N / block] int32."""
    read_kernel[len(values) // block,](values, sums, BLOCK=block, num_warps=num_warps)


@triton.jit
def read_kernel(p_values, p_sums, BLOCK: tl.constexpr):  # noqa: N803
    i_block = tl.program_id(0).to(tl.int64)
    values = tl.load(p_values + i_block * BLOCK + tl.arange(0, BLOCK))
    tl.store(p_sums + i_block, tl.sum(values, 0))
