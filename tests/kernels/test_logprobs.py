"""Logprobs against the reference, with ties, and in pieces."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.logprobs as op
from kernels.logprobs.reference import logprobs_row

TOLERANCE = 2e-5  # float32 sums of up to 200 exponentials


@pytest.mark.parametrize("piece", [1, 1 << 22])
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**9),
    st.integers(1, 5),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_rows_tell_what_the_reference_tells(
    piece: int, seed: int, num: int, vocab_size: int, num_top: int | None
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-20, 20, (num, vocab_size)) / 4).astype(np.float32)
    tokens = rng.integers(0, vocab_size, num)
    num_top = None if num_top is None else min(num_top, vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "PIECE_LOGITS", piece)
        told = op.logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), num_top)
    for row in range(num):
        own, rank, values, top_ids = logprobs_row(logits[row], int(tokens[row]), num_top)
        assert abs(float(told.own[row]) - own) < TOLERANCE
        assert int(told.ranks[row]) == rank
        np.testing.assert_allclose(told.values[row], values, atol=TOLERANCE)
        if told.top_ids is not None:
            assert told.top_ids[row].tolist() == top_ids


def test_values_are_told_as_float32_and_ids_as_int32() -> None:
    told = op.logprobs(torch.randn(2, 9), torch.tensor([1, 2]), 3)
    assert told.own.dtype == told.values.dtype == torch.float32
    assert told.ranks.dtype == torch.int32
    assert told.top_ids is not None
    assert told.top_ids.dtype == torch.int32
