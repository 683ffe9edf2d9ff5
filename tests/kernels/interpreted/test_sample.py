"""Sampling by Triton's kernels: what holds of torch's version, and what is special here."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.coins import reference
from kernels.coins.triton import coins as coins_on_device
from kernels.sample import triton as kernels
from tests.kernels.test_slots import (
    test_rows_draw_by_their_slots_what_the_reference_draws,
    test_scores_are_those_that_are_drawn_from,
    test_what_cannot_be_drawn_is_said,
    test_what_ties_with_the_last_is_kept,
)

__all__ = [
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


@triton.jit
def _throw(p_seed, p_token, p_position, p_choice, p_coins, num: tl.constexpr):
    o_token = tl.arange(0, num)
    drawn = coins_on_device(
        tl.load(p_seed), tl.load(p_token + o_token), tl.load(p_position), tl.load(p_choice), 0
    )
    tl.store(p_coins + o_token, drawn.to(tl.int64))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 12345678901234])
def test_coins_agree_bit_for_bit(seed: int) -> None:
    tokens = torch.arange(64, dtype=torch.int32) * 3001
    position, choice = 2**31 + seed % 1000, seed % 7
    drawn = torch.empty(64, dtype=torch.int64)
    _throw[(1,)](
        torch.tensor([seed]),
        tokens,
        torch.tensor([position]),
        torch.tensor([choice], dtype=torch.int32),
        drawn,
        num=64,
    )
    expected = reference.coins(
        np.array(seed), tokens.numpy(), np.array(position), np.array(choice), 0
    )
    assert drawn.tolist() == expected.tolist()
