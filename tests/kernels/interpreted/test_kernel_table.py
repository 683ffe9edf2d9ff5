"""The kernel table of the GPU check, with interpreted kernels."""

import time
from dataclasses import replace

import pytest

from benchmarks.gpu import kernel_table
from benchmarks.gpu.suite import of_test

SUITE = replace(of_test(), batches=(1,), nums_tokens=(1,), rotated_bytes=1)


@pytest.mark.slow
def test_each_kernel_has_a_row_and_attention_agrees_with_torch() -> None:
    rows = list(kernel_table.rows(SUITE, 1.0, time.monotonic() + 60))
    assert not [row for row in rows if "failed" in row]
    differences = [row["difference"] for row in rows if "difference" in row]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_configurations_are_swept_within_the_time() -> None:
    first = next(kernel_table.sweeps(SUITE, time.monotonic() + 60))
    assert set(first["all"]) >= {"8 splits", "16 splits"}
    assert all(isinstance(us, float) for us in first["all"].values())
    assert len(list(kernel_table.sweeps(SUITE, time.monotonic()))) == 1
