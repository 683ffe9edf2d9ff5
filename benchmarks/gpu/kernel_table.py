"""Each kernel in Qwen3-8B's shapes (experts in their models'), compared with torch and with the
time of its memory traffic; then other launch configurations."""

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu import (
    attention_cases,
    expert_cases,
    other_cases,
    product_cases,
    state_cases,
)
from benchmarks.gpu.rows import Case, measure
from benchmarks.gpu.suite import Suite
from benchmarks.gpu.sweeps import sweep
from kernels.dispatch import IS_INTERPRETED


def rows(suite: Suite, read_gb_per_s: float | None, ends_s: float) -> Iterator[dict[str, Any]]:
    """Rows until ``time.monotonic()`` reaches ``ends_s``. A row that fails holds the error."""
    for case in cases(suite):
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


def cases(suite: Suite) -> Iterator[Case]:
    """Cases by their share of a step, largest first."""
    yield from product_cases.cases(suite)
    yield from attention_cases.cases(suite)
    yield from other_cases.cases(suite)
    yield from product_cases.codes_cases(suite)
    yield from expert_cases.cases(suite)
    yield from state_cases.cases(suite)


def _guarded(case: Case, suite: Suite, read_gb_per_s: float | None) -> dict[str, Any]:
    try:
        return measure(case, suite, read_gb_per_s)
    except Exception as error:
        facts = f"{type(error).__name__}: {error}"[:300]
        return {"kernel": case.kernel, "shape": case.shape, "failed": facts}
