"""Sizes of what a program multiplies."""

from kernels.codes.triton import Constants, fitting_span
from kernels.linear.config import MAX_SHARED_BYTES, RESERVED_BYTES, SHARED_BYTES, Config
from kernels.sizes import next_power_of_2

MAX_FEW_TOKENS = 64  # not measured yet


def config(size: int, itemsize: int, num_tokens: int, known: Constants) -> Config:
    """For weights of ``size`` inputs and blocks of ``block_t`` pairs. All of it is arithmetic,
    none of it is measured yet.

    ``block_t`` is the least that there is where most experts have a few tokens or none. There time
    is that of reading weights, and programs are so small that the experts of one token keep all
    processors busy. With more tokens a tile is larger, to be read less often from the L2 cache.
    Codes get half of it, in two programs of a processor: with 64 rows by 64 pairs registers spill.

    What orders a sum depends on the weight alone, so that a token's result is the same bits
    whatever its step has besides: dense weights are multiplied by the instruction for 64 rows,
    codes by that of batches, and codes' spans are the same.
    """
    is_few = num_tokens <= MAX_FEW_TOKENS
    if known.kind == "dense":
        block_t, num_warps = (16, 4) if is_few else (64, 8)
        block_rows = 64 if is_few or itemsize == 4 else 128
        block_k = (128 if is_few else 64) if itemsize == 2 else 32
        block_k = max(16, min(block_k, next_power_of_2(size)))
    else:
        block_t, num_warps = 16 if is_few else 32, 4
        block_rows = 32 if is_few or itemsize == 4 else 64
        block_k = 4 * fitting_span(known.group, 32 if itemsize == 2 else 16)
    weight_bytes = block_rows * itemsize if known.kind == "dense" else block_rows // known.per_place
    num_stages = _num_stages((weight_bytes + block_t * itemsize) * block_k)
    if known.kind == "table" and not is_few:
        num_stages = min(num_stages, 5)  # what is looked up takes room besides
    return Config(block_rows, block_k, block_t, num_warps, num_stages)


def _num_stages(stage_bytes: int) -> int:
    """As many as leave a processor room for a second program."""
    room = min(MAX_SHARED_BYTES, SHARED_BYTES // 2) - RESERVED_BYTES
    return max(2, min(8, room // stage_bytes))
