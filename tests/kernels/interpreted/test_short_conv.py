"""short_conv by Triton's kernels."""

import pytest
import torch

from tests.kernels.attended import Step
from tests.kernels.test_short_conv import STEPS, TOLERANCES
from tests.kernels.test_short_conv import (
    test_each_token_sees_the_last_columns_of_its_sequence as check,
)

SHAPES = [*zip(STEPS, (3, 5, 1, 3), (80, 16, 32, 32), strict=True)]


@pytest.mark.parametrize(("step", "width", "size"), SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_each_token_sees_the_last_columns_of_its_sequence(
    step: Step, width: int, size: int, dtype: torch.dtype
) -> None:
    check(step, width, size, dtype, on_device=True)
