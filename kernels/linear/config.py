"""Tile sizes of ``linear`` and ``gated``."""

from functools import cache
from typing import NamedTuple

from kernels.codes.triton import Constants, fitting_span
from kernels.sizes import cdiv, next_power_of_2

NUM_PROCESSORS = 132  # of an H100 or H200
MIN_PROGRAMS = 96
MIN_CODES_PROGRAMS = 64
SHARED_BYTES = 227 << 10  # per multiprocessor
MAX_SHARED_BYTES = 163 << 10  # per program, on GPUs of compute capability 8.0
RESERVED_BYTES = 2 << 10  # per program: 1 KB is the driver's, and kernels exchange some


class Config(NamedTuple):
    block_rows: int  # rows of the weight
    block_k: int
    block_t: int
    num_warps: int
    num_stages: int

    def options(self, known: Constants) -> dict[str, int]:
        """Launch options. Quantized weights disable fusion: a sum fused with the multiplication by
        a scale would depend on the register layout, and so on the tile sizes."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if known.kind == "dense" else options | {"enable_fp_fusion": False}


@cache
def config(num_rows: int, size: int, itemsize: int, num_tokens: int) -> Config:
    """The configuration for a weight [num_rows, size]. Rows, inputs and warps come from a sweep
    over Qwen3-8B's weights on an H200
    (``benchmarks/results/gpu-sweeps-nvidia-h200-2026-11-26.md``), stages from the room in shared
    memory. Float32 was not swept.

    The order of a sum depends on the weight alone, so a token's result has the same bits for every
    batch: 64 rows use another instruction than 32 or 16. float32 has no tensor cores, and its
    operands stay in registers.
    """
    block_rows = _block_rows(num_rows) if itemsize == 2 else 32  # 64 rows spill registers
    block_k = (128 if block_rows == 64 else 256) if itemsize == 2 else 32
    block_k = min(block_k, next_power_of_2(size))
    block_t = max(16, next_power_of_2(num_tokens))
    has_many = block_t == 64 and (block_rows == 64 or itemsize == 4)
    stage_bytes = (block_rows + block_t) * block_k * itemsize
    num_stages = _num_stages(cdiv(num_rows, block_rows), stage_bytes)
    return Config(block_rows, block_k, block_t, 8 if has_many else 4, num_stages)


def _block_rows(num_rows: int) -> int:
    """The most rows that leave three programs for four multiprocessors."""
    return next((rows for rows in (64, 32) if num_rows >= rows * MIN_PROGRAMS), 16)


@cache
def codes_config(
    num_rows: int, size: int, itemsize: int, num_tokens: int, known: Constants
) -> Config:
    """The configuration for a quantized weight and tokens of ``itemsize`` bytes.

    Decoding takes more instructions than fit in the time of reading, so rows are as many as leave
    enough programs for all multiprocessors; programs share the cost of the tokens. The order of a
    sum depends on the weight alone through ``block_k``, four spans of inputs summed at once.
    """
    alone = next((rows for rows in (64, 32) if num_rows > rows * NUM_PROCESSORS), 16)
    has_more = num_tokens > 8 and num_rows >= 32 * MIN_CODES_PROGRAMS
    block_rows = max(alone, 32) if has_more else alone
    block_t = max(16, next_power_of_2(num_tokens))
    if itemsize == 4 or block_t == 64:
        block_rows = min(block_rows, 32)  # 64 rows spill registers, with Triton 3.6 at least
    span = fitting_span(known.group, 32 if itemsize == 2 else 16)
    num_warps = 4 if block_t < 64 else 8
    stage_bytes = (block_rows // known.per_place + block_t * itemsize) * 4 * span
    num_stages = _num_stages(cdiv(num_rows, block_rows), stage_bytes)
    return Config(block_rows, 4 * span, block_t, num_warps, num_stages)


def _num_stages(num_programs: int, stage_bytes: int) -> int:
    """The most stages that fit while all programs are resident, up to three per multiprocessor;
    with more programs two are resident. One program gets a multiprocessor if sharing it leaves
    fewer than three stages."""
    num_residents = cdiv(num_programs, NUM_PROCESSORS)
    num_residents = num_residents if num_residents <= 3 else 2
    rooms = (min(MAX_SHARED_BYTES, SHARED_BYTES // num) for num in (num_residents, 1))
    fitting = [(room - RESERVED_BYTES) // stage_bytes for room in rooms]
    return max(2, min(8, fitting[0] if fitting[0] >= 3 else fitting[1]))
