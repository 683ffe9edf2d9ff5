"""Logprobs by Triton's kernels: the properties of torch's version, over one chunk and several."""

import pytest

from kernels.logprobs import triton
from tests.kernels.test_crowds import test_each_row_of_a_crowd_has_the_logprobs_of_the_reference
from tests.kernels.test_slots import (
    test_a_row_that_is_not_finite_names_tokens_and_disturbs_no_other,
    test_logprobs_of_rows_that_want_them_match_the_reference,
)

# NumPy warns about differences of infinities, a device does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, params=[256, 2048])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "CHUNK", request.param)
