"""``hide``: one program per piece of a row, which writes only the hidden ids."""

import triton
import triton.language as tl
from torch import Tensor

from kernels.sizes import cdiv

BLOCK = 4096
NUM_WARPS = 4


def launch(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    num_rows, vocab_size = len(rows), logits.shape[1]
    if not num_rows:
        return
    hide_kernel[num_rows, cdiv(vocab_size, BLOCK)](
        *(logits, rows, masks, logits.stride(0), masks.stride(0), vocab_size),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


@triton.jit
def hide_kernel(
    p_logits,  # [S, V]
    p_rows,  # [M]
    p_masks,  # [M, W]
    logits_stride,
    mask_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(p_rows + i_row)
    o_token = i_block * BLOCK + tl.arange(0, BLOCK)
    is_token = o_token < vocab_size
    words = tl.load(p_masks + i_row * mask_stride + o_token // 32, mask=is_token, other=0)
    is_hidden = ((words >> (o_token % 32)) & 1) == 0
    hidden = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(p_logits + row * logits_stride + o_token, hidden, mask=is_token & is_hidden)
