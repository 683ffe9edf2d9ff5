"""Tile sizes of the experts' GEMMs."""

from functools import cache

from kernels.codes.triton import Constants, fitting_span
from kernels.linear.config import MAX_SHARED_BYTES, RESERVED_BYTES, SHARED_BYTES, Config
from kernels.sizes import next_power_of_2


@cache
def config(size: int, itemsize: int, block: int, known: Constants) -> Config:
    """The configuration for a weight with ``size`` inputs and the ``block`` of dense weights,
    computed from sizes and not measured yet.

    Blocks have 16 pairs while most experts have few tokens or none: reading weights dominates, and
    programs are so small that one token's experts occupy all multiprocessors. With more tokens
    tiles are larger, to be read less often from the L2 cache. Quantized weights get up to 32 pairs,
    in two programs per multiprocessor: registers spill with 64 rows by 64 pairs.

    The order of a sum depends on the weight alone, so a token's result has the same bits for every
    batch: dense weights always use the instruction for 64 rows, quantized ones the batch
    instruction and equal spans.
    """
    is_few = block == 16
    if known.kind == "dense":
        block_t, num_warps = block, 4 if is_few else 8
        block_rows = 64 if is_few or itemsize == 4 else 128
        block_k = (128 if is_few else 64) if itemsize == 2 else 32
        block_k = max(16, min(block_k, next_power_of_2(size)))
    else:
        block_t, num_warps = 16 if is_few else 32, 4
        block_rows = 32 if is_few or itemsize == 4 else 64
        block_k = 4 * fitting_span(known.group, 32 if itemsize == 2 else 16)
    weight_bytes = block_rows * itemsize if known.kind == "dense" else block_rows // known.per_place
    num_stages = _num_stages((weight_bytes + block_t * itemsize) * block_k, block_t)
    if known.kind == "table" and not is_few:
        num_stages = min(num_stages, 5)  # the table needs shared memory too
    return Config(block_rows, block_k, block_t, num_warps, num_stages)


def _num_stages(stage_bytes: int, block_t: int) -> int:
    """The most stages that leave a multiprocessor room for a second program, which blocks of 256
    have no registers for."""
    room = MAX_SHARED_BYTES if block_t > 128 else min(MAX_SHARED_BYTES, SHARED_BYTES // 2)
    return max(2, min(8, (room - RESERVED_BYTES) // stage_bytes))
