"""The memory operators get in these tests."""

import torch

from tests.unwritten import HUGE


def test_unwritten_numbers_are_nan_or_huge() -> None:
    floats, ints = torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    for each in (torch.empty(5), torch.empty_like(floats), floats.new_empty(7)):
        assert each.isnan().all()
    for each in (torch.empty(5, dtype=torch.int64), torch.empty_like(ints), ints.new_empty(7)):
        assert (each == HUGE).all()
