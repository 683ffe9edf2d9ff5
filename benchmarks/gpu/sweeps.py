"""Launch configurations other than the chosen ones, to find the best for a GPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.gpu import attention_cases, product_cases
from benchmarks.gpu.product_cases import Product
from benchmarks.gpu.rows import Case
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.timing import seconds

NUMS_SPLITS = (4, 8, 16, 32, 64)
# Rows of the weight, inputs per iteration and stages; each with 4 and with 8 warps.
CONFIGS = (
    *((16, 128, 8), (16, 256, 4), (16, 256, 6), (16, 256, 8), (16, 512, 3), (16, 512, 4)),
    *((32, 64, 8), (32, 128, 4), (32, 128, 6), (32, 128, 8), (32, 256, 3), (32, 256, 4)),
    *((64, 64, 4), (64, 64, 6), (64, 128, 3), (64, 128, 4), (64, 128, 5)),
)


def sweep(suite: Suite) -> Iterator[dict[str, Any]]:
    """A row for each operator and shape: microseconds by configuration."""
    for context in suite.contexts:
        yield _splits(suite, context)
    for num_tokens in suite.nums_tokens:
        for product in product_cases.products(suite):
            yield _configs(suite, product, num_tokens)


def _splits(suite: Suite, context: int) -> dict[str, Any]:
    from kernels.paged_attention import triton

    case = attention_cases.decode_case(suite, suite.batches[0], context)
    found = {}
    for num in NUMS_SPLITS:
        with patch.object(triton, "NUM_SPLITS", num):
            found[f"{num} splits"] = _us(suite, case)
    return _row(case, f"{triton.NUM_SPLITS} splits", found)


def _configs(suite: Suite, product: Product, num_tokens: int) -> dict[str, Any]:
    from kernels.linear import triton
    from kernels.linear.config import config as choose

    shape = product.num_rows, product.size
    chosen = choose(*shape, suite.dtype.itemsize, num_tokens)
    case = product_cases.case(suite, product, num_tokens)
    found = {_facts(chosen): _us(suite, case)}
    for rows, block_k, stages in CONFIGS:
        for num_warps in (4, 8):
            config = chosen._replace(
                block_rows=rows, block_k=block_k, num_warps=num_warps, num_stages=stages
            )
            if _facts(config) not in found:
                with patch.object(triton, "config", partial(_given, config)):
                    found[_facts(config)] = _us(suite, case)
    return _row(case, _facts(chosen), found)


def _given(config: Any, *_: int) -> Any:
    return config


def _facts(config: Any) -> str:
    size = f"{config.block_rows} × {config.block_k}"
    return f"{size}, {config.num_warps} warps, {config.num_stages} stages"


def _us(suite: Suite, case: Case) -> float | str:
    """Microseconds, or the error if the configuration does not fit."""
    try:
        return seconds(case.make()[0], suite.device) * 1e6
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:100]


def _row(case: Case, chosen: str, found: dict[str, float | str]) -> dict[str, Any]:
    times = {name: us for name, us in found.items() if isinstance(us, float)}
    best = min(times, key=lambda name: times[name], default=chosen)
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "chosen": chosen,
        "chosen_us": found[chosen],
        "best": best,
        "best_us": found[best],
        "all": found,
    }
