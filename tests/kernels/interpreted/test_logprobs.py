"""Logprobs by Triton's kernels: what holds of torch's version, over one chunk and several."""

import numpy as np
import pytest
import torch

from kernels.logprobs import MAX_TOP, logprobs_slots, triton
from tests.kernels.test_slots import (
    test_logprobs_of_rows_that_want_them_are_those_of_the_reference,
)

__all__ = ["test_logprobs_of_rows_that_want_them_are_those_of_the_reference"]

# Numpy warns of what a device does in silence: differences of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True, params=[256, 2048])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "CHUNK", request.param)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_names_tokens_and_disturbs_no_other(wrong: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(3, 300)).astype(np.float32))
    tokens, slots = torch.tensor([5, 6, -1]), torch.arange(3, dtype=torch.int32)
    wants = torch.full((3,), MAX_TOP, dtype=torch.int32)
    expected = logprobs_slots(logits, tokens, wants, slots)
    broken = logits.clone()
    broken[1, ::3] = wrong
    told = logprobs_slots(broken, tokens, wants, slots)
    assert ((told[1] >= 0) & (told[1] < 300)).all()
    for ours, theirs in zip(told, expected, strict=True):
        assert ours[0].equal(theirs[0])
        assert ours[2].equal(theirs[2])
