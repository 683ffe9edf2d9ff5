"""Logprobs against the reference, with ties."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.logprobs import logprobs
from kernels.logprobs.reference import logprobs_row

TOLERANCE = 2e-5  # float32 sums of up to 200 exponentials


@settings(max_examples=200)
@given(
    st.integers(0, 10**9),
    st.integers(1, 5),
    st.integers(1, 60),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_rows_tell_what_the_reference_tells(
    seed: int, num: int, vocab_size: int, num_top: int | None
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-20, 20, (num, vocab_size)) / 4).astype(np.float32)
    tokens = rng.integers(0, vocab_size, num)
    num_top = None if num_top is None else min(num_top, vocab_size)
    told = logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), num_top)
    for row in range(num):
        own, rank, values, top_ids = logprobs_row(logits[row], int(tokens[row]), num_top)
        np.testing.assert_allclose(told.values[row], [own, *values], atol=TOLERANCE)
        assert int(told.ranks[row]) == rank
        assert told.top_ids[row].tolist() == top_ids


def test_values_are_told_as_float32_and_ids_as_int32() -> None:
    for num_top in (0, 3, None):
        told = logprobs(torch.randn(2, 9), torch.tensor([1, 2]), num_top)
        assert told.values.dtype == torch.float32
        assert told.top_ids.dtype == told.ranks.dtype == torch.int32
