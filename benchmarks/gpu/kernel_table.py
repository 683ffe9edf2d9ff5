"""Each kernel in Qwen3-8B's shapes, beside torch and beside what its bytes take; then other launch
configurations. ``python -m benchmarks.gpu.kernel_table`` prints a line for each, as they come."""

import argparse
import json
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

from benchmarks.gpu import attention_cases, floor, other_cases, product_cases
from benchmarks.gpu.rows import Case, measure
from benchmarks.gpu.suite import Suite, of_card, of_test
from benchmarks.gpu.sweeps import sweep
from kernels.dispatch import IS_INTERPRETED


def rows(suite: Suite, read_gb_per_s: float | None, ends_s: float) -> Iterator[dict[str, Any]]:
    """Until the clock ``time.monotonic`` says ``ends_s``. A row that fails says why."""
    for case in _cases(suite):
        if time.monotonic() > ends_s:
            return
        yield _guarded(case, suite, read_gb_per_s)


def sweeps(suite: Suite, ends_s: float) -> Iterator[dict[str, Any]]:
    """As ``rows``; torch has no configurations."""
    if suite.device.type != "cuda" and not IS_INTERPRETED:
        return
    for row in sweep(suite):
        yield row
        if time.monotonic() > ends_s:
            return


def _cases(suite: Suite) -> Iterator[Case]:
    """Those that most of a step goes to first."""
    yield from product_cases.cases(suite)
    yield from attention_cases.cases(suite)
    yield from other_cases.cases(suite)


def _guarded(case: Case, suite: Suite, read_gb_per_s: float | None) -> dict[str, Any]:
    try:
        return measure(case, suite, read_gb_per_s)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"[:300]
        return {"kernel": case.kernel, "shape": case.shape, "failed": told}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=480.0, help="(default: %(default)g)")
    arguments = parser.parse_args()
    suite = of_test() if arguments.tiny else of_card()
    ends_s = time.monotonic() + arguments.seconds
    bandwidth = floor.measure(suite)
    print(json.dumps(bandwidth))
    for row in chain(rows(suite, bandwidth["read"], ends_s), sweeps(suite, ends_s)):
        print(json.dumps(row), flush=True)
