"""Sampling by Triton's kernels: what holds of torch's version."""

import pytest

from kernels.sample import triton as kernels
from tests.kernels.test_crowds import (
    test_each_row_of_a_crowd_draws_what_the_reference_draws,
    test_each_row_of_a_crowd_keeps_what_the_reference_keeps,
)
from tests.kernels.test_slots import (
    test_rows_draw_by_their_slots_what_the_reference_draws,
    test_scores_are_those_that_are_drawn_from,
    test_what_cannot_be_drawn_is_said,
    test_what_ties_with_the_last_is_kept,
)

__all__ = [
    "test_each_row_of_a_crowd_draws_what_the_reference_draws",
    "test_each_row_of_a_crowd_keeps_what_the_reference_keeps",
    "test_rows_draw_by_their_slots_what_the_reference_draws",
    "test_scores_are_those_that_are_drawn_from",
    "test_what_cannot_be_drawn_is_said",
    "test_what_ties_with_the_last_is_kept",
]

# Numpy warns of what a device does in silence: logarithms of 0, differences of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, params=[40, 4096])
def max_listed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and blocks to a row, and brackets that fit in their list or do not."""
    small = {"CHUNK": 512, "PIVOT_TILE": 128, "BLOCK": 512, "MAX_LISTED": request.param}
    for name, value in small.items():
        monkeypatch.setattr(kernels, name, value)
