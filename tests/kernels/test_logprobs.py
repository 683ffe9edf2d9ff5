"""Logprobs against the reference, with ties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.logprobs import logprobs
from kernels.logprobs.reference import logprobs_row
from services.worker.step.sampler import Sampler

TOLERANCE = 2e-5  # float32 sums of up to 200 exponentials


@settings(max_examples=200)
@given(
    st.integers(0, 10**9),
    st.integers(1, 5),
    st.one_of(st.integers(1, 60), st.sampled_from([512, 1500])),
    st.one_of(st.none(), st.integers(0, 60)),
    st.sampled_from([0.0, 0.3]),
)
def test_rows_have_the_logprobs_of_the_reference(
    sampler: Sampler, seed: int, num: int, vocab_size: int, num_top: int | None, share_hidden: float
) -> None:
    """Some rows, with ties, hidden logits and both zeros."""
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-20, 20, (num, vocab_size)) / 4).astype(np.float32)
    logits[rng.random(logits.shape) < share_hidden] = -np.inf
    logits[(logits == 0) & (rng.random(logits.shape) < 0.5)] = -0.0
    logits[:, rng.integers(vocab_size)] = 0
    rows = np.flatnonzero(rng.random(num) < 0.8)
    tokens = rng.integers(0, vocab_size, num)
    num_top = None if num_top is None else min(num_top, vocab_size)
    result = sampler.logprobs(torch.from_numpy(logits), torch.from_numpy(tokens), num_top, rows)
    for index, row in enumerate(rows):
        own, rank, values, top_ids = logprobs_row(logits[row], int(tokens[row]), num_top)
        np.testing.assert_allclose(result.values[index], [own, *values], atol=TOLERANCE)
        assert int(result.ranks[index]) == rank
        assert result.top_ids[index].tolist() == top_ids


@pytest.mark.parametrize("num_top", [1, 20, 200, 5000, None])
def test_logprobs_of_a_large_vocabulary_are_the_same_bits_alone_and_among_others(
    sampler: Sampler, num_top: int | None
) -> None:
    rng, num = np.random.default_rng(8), 9
    logits = torch.from_numpy(rng.normal(size=(num, 40_001)).astype(np.float32) * 4)
    tokens = torch.from_numpy(rng.integers(0, 40_001, num))
    result = sampler.logprobs(logits, tokens, num_top)
    for row in range(num):
        own, rank, values, top_ids = logprobs_row(logits[row].numpy(), int(tokens[row]), num_top)
        np.testing.assert_allclose(result.values[row], [own, *values], atol=TOLERANCE)
        assert int(result.ranks[row]) == rank
        assert result.top_ids[row].tolist() == top_ids
        alone = sampler.logprobs(logits, tokens, num_top, np.array([row]))
        assert alone.values[0].equal(result.values[row])


def test_logprobs_of_named_ids_match_the_whole_vocabulary_bit_by_bit(
    sampler: Sampler,
) -> None:
    rng = np.random.default_rng(6)
    logits = torch.from_numpy(rng.normal(size=(9, 40_001)).astype(np.float32) * 4)
    rows, tokens = np.array([1, 4, 8]), torch.from_numpy(rng.integers(0, 40_001, 9))
    ids = rng.integers(0, 40_001, (3, 128))
    found = sampler.logprobs(logits, tokens, 128, rows, ids)
    whole = sampler.logprobs(logits, tokens, None, rows)
    assert found.top_ids.tolist() == ids.tolist()
    assert found.top_ids.dtype == torch.int32
    assert found.ranks.equal(whole.ranks)
    assert found.values[:, 0].equal(whole.values[:, 0])
    assert found.values[:, 1:].equal(whole.values[:, 1:].gather(1, torch.from_numpy(ids)))


@pytest.mark.parametrize("num_top", [0, 1, 200, None])
def test_logprobs_of_prompts_and_many_likeliest_tokens_break_ties_alike_on_every_device(
    device: torch.device, num_top: int | None
) -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy((rng.integers(-20, 20, (9, 40_001)) / 4).astype(np.float32))
    tokens = torch.from_numpy(rng.integers(0, 40_001, 9))
    result = logprobs(logits.to(device), tokens.to(device), num_top)
    for row in range(9):
        own, rank, values, top_ids = logprobs_row(logits[row].numpy(), int(tokens[row]), num_top)
        np.testing.assert_allclose(result.values[row].cpu(), [own, *values], atol=TOLERANCE)
        assert int(result.ranks[row]) == rank
        assert result.top_ids[row].tolist() == top_ids


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_do_not_disturb_others(sampler: Sampler, wrong: float) -> None:
    """Its own logprobs are meaningless, but its ids are valid."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(4, 2000)).astype(np.float32))
    tokens = torch.tensor([5, 6, 7, 8])
    expected = sampler.logprobs(logits, tokens, 30)
    broken = logits.clone()
    broken[1], broken[3, ::3] = wrong, wrong
    result = sampler.logprobs(broken, tokens, 30)
    assert ((result.top_ids >= 0) & (result.top_ids < 2000)).all()
    for row in (0, 2):
        assert result.values[row].equal(expected.values[row])
        assert result.top_ids[row].equal(expected.top_ids[row])
        assert result.ranks[row] == expected.ranks[row]


def test_values_are_float32_and_ids_int32(sampler: Sampler) -> None:
    for num_top in (0, 3, None):
        result = sampler.logprobs(torch.randn(2, 9), torch.tensor([1, 2]), num_top)
        assert result.values.dtype == torch.float32
        assert result.top_ids.dtype == result.ranks.dtype == torch.int32
