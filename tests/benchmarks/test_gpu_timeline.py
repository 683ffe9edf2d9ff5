"""The check's report of a step's kernels and of the GPU's clocks."""

from typing import Any

import pytest

from benchmarks.gpu.clocks import summary
from benchmarks.gpu.timeline import read_events, steps_of, table


def kernel(name: str, start: float, us: float, grid: list[int] | None = None) -> dict[str, Any]:
    return {"cat": "kernel", "name": name, "ts": start, "dur": us, "args": {"grid": grid or [1]}}


def trace() -> list[dict[str, Any]]:
    """Two steps of three kernels, after a prompt's step and before a truncated one."""
    prompt = [kernel("decode_inputs", 0, 1), kernel("chunk", 1, 90)]
    steps = [
        each
        for start in (100, 200)
        for each in (
            kernel("decode_inputs", start, 2),
            kernel("product", start + 5, 20, [8]),
            kernel("product", start + 26, 30, [8]),
        )
    ]
    others = [{"cat": "cuda_runtime", "name": "launch", "ts": 101, "dur": 50}]
    return [*others, *reversed(steps), *prompt, kernel("decode_inputs", 300, 2)]


def test_a_step_is_reported_kernel_by_kernel_with_the_gaps_before_them() -> None:
    steps = steps_of(read_events(trace(), ("kernel",)), "decode_inputs")
    assert [len(step) for step in steps] == [4, 4], "with the beginning of the next"
    first, product, whole = table(steps)
    assert (first["kernel"], first["times"], first["us"], first["gap_us"]) == (
        "decode_inputs", 1, 2, 0,
    )  # fmt: skip
    assert (product["times"], product["us"], product["gap_us"]) == (2, 25, 2)
    assert product["share"] == pytest.approx((50 + 4) / 100)
    assert (whole["times"], whole["us"], whole["gap_us"]) == (3, 52, 4)
    assert (whole["gap_after_us"], whole["span_us"]) == (44, 100)


def test_kernels_of_one_name_and_other_grids_are_reported_separately() -> None:
    step = [kernel("a", 0, 1, [4]), kernel("a", 2, 1, [8]), kernel("a", 9, 1, [4])]
    events = read_events(step, ("kernel",))
    *kernels, _ = table([events])
    assert [row["grid"] for row in kernels] == ["[4]", "[8]"]


def test_clocks_are_reported_with_the_reasons_for_throttling() -> None:
    lines = ["1980, 2619, 400.5, 50, 0x0000000000000000", "1200, 2619, 690.0, 61, 0x4", ""]
    found = summary([*lines, "345, 2619, 70.0, 40, 0x1", "345, 26"])
    assert found["SM MHz"] == [345, 1200, 1980]
    assert found["W"] == [70.0, 400.5, 690.0]
    assert found["reasons"] == ["0x4"]


def test_an_error_of_the_driver_is_kept_in_place_of_clocks() -> None:
    assert summary(["No devices were found"]) == {"unreadable": ["No devices were found"]}
    assert summary([]) == {}
