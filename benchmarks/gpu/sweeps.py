"""Other launch configurations than those that are chosen: what a card would have us choose."""

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
# Beside the configuration that is chosen: factors of its rows, parts and columns, more stages. The
# last four are what was chosen before any card: of 16 rows, of 64 rows, of two parts.
VARIANTS = (
    (1, 1, 1, 0),
    (0.5, 1, 1, 0),
    (2, 1, 1, 0),
    (1, 2, 1, 0),
    (1, 1, 0.5, 0),
    (1, 1, 2, 0),
    (1, 1, 1, -2),
    (0.5, 1, 2, 0),
    (2, 1, 0.5, 2),
    (1, 1, 1, 2),
    (1, 0.5, 1, 1),
    (1, 0.5, 1, -1),
)


def sweep(suite: Suite) -> Iterator[dict[str, Any]]:
    """A row for each operator and shape: microseconds by configuration."""
    for context in suite.contexts:
        yield _splits(suite, context)
    for num_tokens in (suite.nums_tokens[0], suite.nums_tokens[-1]):
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

    itemsize = suite.dtype.itemsize
    shape = product.num_rows, product.size
    chosen = triton.config(*shape, itemsize, num_tokens, product.is_normed)
    case = product_cases.case(suite, product, num_tokens)
    found = {}
    for rows, parts, columns, stages in VARIANTS:
        config = chosen._replace(
            block_rows=int(chosen.block_rows * rows),
            num_parts=min(2, max(1, int(chosen.num_parts * parts))),
            block_k=int(chosen.block_k * columns),
            num_stages=max(1, chosen.num_stages + stages),
        )
        if _facts(config) not in found:
            with patch.object(triton, "config", partial(_given, config)):
                found[_facts(config)] = _us(suite, case)
    return _row(case, _facts(chosen), found)


def _given(config: Any, *_: int) -> Any:
    return config


def _facts(config: Any) -> str:
    rows = f"{config.num_parts} × {config.block_rows}"
    return f"{rows} × {config.block_k}, {config.num_stages} stages"


def _us(suite: Suite, case: Case) -> float | str:
    """Of what fits; else why it does not."""
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
