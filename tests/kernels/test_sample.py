"""Sampling: filters against numpy, noise that replays, distributions, and what is skipped."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernels.sample import filters, prepare_random_rows, reference, sample
from kernels.sample.gumbel import MAX_GAP, gumbel
from kernels.sample.rows import RandomRows

CPU = torch.device("cpu")
NEAR = 1e-5  # a mass so close to p, in float32, may fall on either side


def random_rows(num: int, **values: Any) -> RandomRows | None:
    """``num`` rows; a value is one for all, or an array."""
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seeds": 0,
        "positions": 5,
        "choices": 0,
    }
    dtypes = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
    arrays = {
        name: np.broadcast_to(np.asarray(value, dtypes.get(name, np.int64)), num).copy()
        for name, value in (defaults | values).items()
    }
    return prepare_random_rows(**arrays, device=CPU)


# Scores on a grid, so that ties are common.
SCORES = st.lists(st.integers(-24, 24).map(lambda x: x / 4), min_size=2, max_size=40)


@settings(max_examples=200)
@given(scores=SCORES, top_k=st.integers(0, 45))
def test_top_k_keeps_what_is_at_least_the_kth(scores: list[float], top_k: int) -> None:
    rows = torch.tensor([scores, scores])
    kept = filters.keep_top_k(rows, torch.tensor([top_k, 0]), max(top_k, 1))
    expected = reference.kept_by_top_k(np.array(scores), top_k)
    np.testing.assert_array_equal(kept[0].isfinite().numpy(), expected)
    assert kept[1].equal(rows[1])


@settings(max_examples=200)
@given(scores=SCORES, top_p=st.floats(2.0**-10, 1.0, width=32))
def test_top_p_keeps_the_smallest_set_of_that_mass_and_its_ties(
    scores: list[float], top_p: float
) -> None:
    rows = torch.tensor([scores, scores])
    kept = filters.keep_top_p(rows, torch.tensor([top_p, 1.0]))[0].isfinite().numpy()
    probs = np.exp(np.array(scores)) / np.exp(scores).sum()
    lowest = probs[kept].min()
    assert probs[kept].sum() >= top_p - NEAR
    assert (probs[~kept] < lowest).all()
    assert probs[probs > lowest * (1 + 1e-6)].sum() < top_p + NEAR
    if np.abs(np.cumsum(np.sort(probs)[::-1]) - top_p).min() > NEAR:
        np.testing.assert_array_equal(kept, reference.kept_by_top_p(np.array(scores), top_p))


@settings(max_examples=200)
@given(scores=SCORES, min_p=st.floats(0.0, 1.0, width=32))
def test_min_p_keeps_what_is_probable_enough_beside_the_highest(
    scores: list[float], min_p: float
) -> None:
    rows = torch.tensor([scores, scores])
    kept = filters.keep_min_p(rows, torch.tensor([min_p, 0.0]))
    shares = np.exp(np.array(scores) - max(scores))
    is_clear = np.abs(shares - min_p) > NEAR
    expected = reference.kept_by_min_p(np.array(scores), min_p)
    np.testing.assert_array_equal(kept[0].isfinite().numpy()[is_clear], expected[is_clear])
    assert kept[0].isfinite().any()
    assert kept[1].equal(rows[1])


@pytest.mark.parametrize("value", [0.05, 0.3, 0.9])
def test_filters_keep_what_those_of_transformers_keep(value: float) -> None:
    scores = torch.from_numpy(np.random.default_rng(7).normal(size=(20, 300)) * 3).float()
    values, top_k = torch.full((20,), value), int(value * 100)
    kept_by = {
        MinPLogitsWarper(value): filters.keep_min_p(scores, values),
        TopKLogitsWarper(top_k): filters.keep_top_k(scores, torch.full((20,), top_k), top_k),
        TopPLogitsWarper(value): filters.keep_top_p(scores, values),
    }
    for warper, kept in kept_by.items():
        assert not kept.isfinite().all()
        assert kept.equal(warper(None, scores)), type(warper)


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_a_wide_and_a_narrow_nucleus_are_found_alike(spread: float) -> None:
    """Beyond the first try of 128 tokens the row is sorted; the set is the same."""
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 1000)) * spread).float()
    kept = filters.keep_top_p(scores, torch.full((4,), 0.8)).isfinite().numpy()
    assert (kept.sum(-1) > filters.NUM_NUCLEUS_TRY).all() == (spread < 1)
    for row, row_kept in zip(scores.numpy(), kept, strict=True):
        np.testing.assert_array_equal(row_kept, reference.kept_by_top_p(row.astype(float), 0.8))


@settings(max_examples=60)
@given(data=st.data())
def test_a_mixed_batch_draws_what_the_reference_draws_row_by_row(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    values = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], num).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 300], num),
        "top_p": rng.choice([1.0, 0.9, 0.2], num).astype(np.float32),
        "min_p": rng.choice([0.0, 0.01, 0.3], num).astype(np.float32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, num),
        "positions": rng.integers(0, 10**6, num),
        "choices": rng.integers(0, 9, num),
    }
    logits = rng.normal(size=(num, 200)).astype(np.float32) * 6
    tokens = sample(torch.from_numpy(logits), random_rows(num, **values))
    expected = [
        reference.sample_row(row, *(array[i].item() for array in values.values()))
        for i, row in enumerate(logits)
    ]
    assert tokens.tolist() == expected


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert sample(logits, None).tolist() == [1, 0]
    assert random_rows(2, temperature=[0.0, 9e-6]) is None
    mixed = random_rows(2, temperature=[0.0, 1.0], top_k=1)
    assert sample(logits, mixed)[0] == 1


@pytest.mark.parametrize("varied", ["positions", "choices"])
def test_positions_and_choices_draw_independently(varied: str) -> None:
    """Pairs of neighbouring draws over 4 equal tokens: 15 degrees of freedom, 99.9th is 37.7."""
    num = 16000
    random = random_rows(num, seeds=-77, **{varied: np.arange(num)})
    tokens = sample(torch.zeros(num, 4), random).numpy()
    pairs = np.bincount(tokens[0::2] * 4 + tokens[1::2], minlength=16)
    expected = num / 2 / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7


def test_noise_stays_within_the_gap_that_is_skipped() -> None:
    noise = gumbel(torch.tensor([0, 1, 255, 256, 2**31, 2**32 - 1]))
    assert noise.isfinite().all()
    assert noise.max() - noise.min() < MAX_GAP
    assert (noise[2:].diff() > 0).all()


def test_what_is_skipped_would_not_have_won() -> None:
    logits = np.random.default_rng(4).normal(size=(64, 500)).astype(np.float32) * 12
    tokens = sample(torch.from_numpy(logits), random_rows(64, seeds=np.arange(64)))
    for row, token, seed in zip(logits, tokens.tolist(), range(64), strict=True):
        assert token == (row.astype(float) + reference.noise(500, seed, 5, 0)).argmax()
