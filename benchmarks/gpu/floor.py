"""Memory bandwidth and GEMM throughput of the GPU, the bounds of a step."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.shapes import Config, token_bytes, weights_bytes
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.timing import seconds

# 4-byte words per program, and its warps; the fastest counts.
READ_CONFIGS = ((4096, 4), (8192, 4), (8192, 8), (16384, 8))


def measure(suite: Suite) -> dict[str, Any]:
    """GB/s and TFLOP/s with random data, since constant data draws less power and may clock higher.
    Our own kernel reads; ``copied`` counts the reads and writes of torch's copy."""
    return _bandwidth(suite) | {"product_tflop_per_s": _product_tflop_per_s(suite)}


def _bandwidth(suite: Suite) -> dict[str, Any]:
    shape = (suite.read_bytes // 4,)
    values = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=suite.device)
    reads = {
        f"{block} words, {num_warps} warps": _gb_per_s(
            values.nbytes, [partial(_read, values, block, num_warps)], suite
        )
        for block, num_warps in READ_CONFIGS
    }
    other = torch.empty_like(values)
    copied = _gb_per_s(2 * values.nbytes, [partial(other.copy_, values)], suite)
    return {"read": max(reads.values()), "copied": copied, "GB": values.nbytes / 1e9} | reads


def _product_tflop_per_s(suite: Suite) -> float:
    """Throughput of a large square torch.mm."""
    size = suite.product_size
    one, other = (
        torch.empty(size, size, dtype=suite.dtype, device=suite.device).normal_() for _ in range(2)
    )
    return 2 * size**3 / seconds([partial(torch.mm, one, other)], suite.device) / 1e12


def step_floor_s(
    config: Config, itemsize: int, num_rows: int, context: float, read_gb_per_s: float
) -> float:
    """The least time of a step in which ``num_rows`` sequences with ``context`` known tokens decode
    one token each."""
    num_bytes = weights_bytes(config, itemsize) + num_rows * context * token_bytes(config, itemsize)
    return num_bytes / (read_gb_per_s * 1e9)


def _gb_per_s(num_bytes: int, runs: list[Any], suite: Suite) -> float:
    return num_bytes / seconds(runs, suite.device) / 1e9


def _read(values: Tensor, block: int, num_warps: int) -> None:
    if not values.is_cuda:
        values.sum()
        return
    from benchmarks.gpu import read_kernel

    sums = torch.empty(len(values) // block, dtype=torch.int32, device=values.device)
    read_kernel.launch(values, sums, block, num_warps)
