"""Sampling by Triton's kernels: the properties of torch's version."""

import pytest

from kernels.sample import triton as kernels
from tests.kernels.test_crowds import (
    test_each_row_of_a_crowd_keeps_like_the_reference,
    test_each_row_of_a_crowd_samples_like_the_reference,
)
from tests.kernels.test_slots import (
    test_logits_of_some_tokens_are_checked_and_spread_ones_drawn_from,
    test_rows_sample_by_their_slots_like_the_reference,
    test_scores_are_the_ones_sampled_from,
    test_slots_that_cannot_be_sampled_have_a_code_in_place_of_a_token,
    test_ties_with_the_last_token_are_kept,
)

# NumPy warns about logarithms of 0 and differences of infinities, a device does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, params=[40, 4096])
def max_listed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and blocks per row, and brackets that fit in their list or not."""
    small = {"CHUNK": 512, "PIVOT_TILE": 128, "BLOCK": 512, "MAX_LISTED": request.param}
    for name, value in small.items():
        monkeypatch.setattr(kernels, name, value)
