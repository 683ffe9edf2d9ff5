"""``prefetch`` as one kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# One for nearly every processor. Each has 16 KB on its way at a time, all together 2 MB: what a
# memory of 3 TB/s gives within its latency. The registers and threads that they take leave room
# for the programs of attention. None of it is measured yet.
NUM_PROGRAMS = 128
BLOCK = 4096  # words
NUM_WARPS = 4


def launch(words: Tensor) -> Tensor:
    """words [N] int32 → what each program has added up of them [NUM_PROGRAMS] int32"""
    sums = torch.empty(NUM_PROGRAMS, dtype=torch.int32, device=words.device)
    prefetch_kernel[NUM_PROGRAMS,](words, sums, len(words), BLOCK=BLOCK, num_warps=NUM_WARPS)
    return sums


@triton.jit(do_not_specialize=["num_words"])
def prefetch_kernel(
    p_words,  # [num_words] int32
    p_sums,  # [NUM_PROGRAMS] int32; what is not used would not be loaded
    num_words,
    BLOCK: tl.constexpr,
):
    """Programs take blocks in turn, so that those at the beginning come first."""
    o_word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_sum = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_words, tl.num_programs(0) * BLOCK):
        is_word = o_word < num_words - start
        b_sum += tl.load(p_words + start + o_word, mask=is_word, other=0, cache_modifier=".cg")
    tl.store(p_sums + tl.program_id(0), tl.sum(b_sum, 0))
