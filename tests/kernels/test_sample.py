"""Sampling: filters against numpy, replayable noise, distributions, and skipped work."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernels.sample import NOT_FINITE, NOTHING_LEFT, filters, prepare_random_rows, reference
from kernels.sample.gumbel import MAX_GAP, gumbel
from kernels.sample.rows import MIN_TEMPERATURE, RandomRows
from kernels.sample.slot_params import COLUMNS, SlotParams
from services.worker.step.sampler import Sampler, TorchSampler

CPU = torch.device("cpu")
NEAR = 1e-5  # a mass so close to p, in float32, may fall on either side


def random_rows(num: int, **values: Any) -> RandomRows | None:
    """``num`` rows; a parameter is one value for all, or an array."""
    defaults = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_n_sigma": 0.0,
        "seeds": 0,
        "positions": 5,
        "choices": 0,
    }
    dtypes = {name: column.host for name, column in COLUMNS._asdict().items()}
    arrays = {
        name: np.broadcast_to(np.asarray(value, dtypes.get(name, np.int64)), num).copy()
        for name, value in (defaults | values).items()
    }
    positions = arrays.pop("positions")
    return prepare_random_rows(SlotParams(**arrays), positions, CPU)


def drawn(sampler: Sampler, logits: Tensor, random: RandomRows | None) -> list[int]:
    tokens: list[int] = sampler.sample(logits, logits, random).tolist()
    return tokens


def kept(sampler: Sampler, scores: Tensor, **values: Any) -> Tensor:
    """``scores`` without filtered tokens."""
    return sampler.process(scores, random_rows(len(scores), **values))


# Scores on a grid, so that ties are common.
SCORES = st.lists(st.integers(-24, 24).map(lambda x: x / 4), min_size=2, max_size=40)


@settings(max_examples=50)
@given(scores=SCORES, top_k=st.integers(0, 45))
def test_top_k_keeps_scores_from_the_kth_up(
    sampler: Sampler, scores: list[float], top_k: int
) -> None:
    rows = torch.tensor([scores, scores])
    first, second = kept(sampler, rows, top_k=[top_k, 0])
    expected = reference.kept_by_top_k(np.array(scores), top_k)
    np.testing.assert_array_equal(first.isfinite().numpy(), expected)
    assert second.equal(rows[1])


@settings(max_examples=50)
@given(scores=SCORES, top_p=st.floats(2.0**-10, 1.0, width=32))
def test_top_p_keeps_the_smallest_set_of_that_mass_and_its_ties(
    sampler: Sampler, scores: list[float], top_p: float
) -> None:
    rows = torch.tensor([scores, scores])
    is_kept, second = kept(sampler, rows, top_p=[top_p, 1.0]).isfinite().numpy()
    assert second.all()
    probs = np.exp(np.array(scores)) / np.exp(scores).sum()
    lowest = probs[is_kept].min()
    assert probs[is_kept].sum() >= top_p - NEAR
    assert (probs[~is_kept] < lowest).all()
    assert probs[probs > lowest * (1 + 1e-6)].sum() < top_p + NEAR
    if np.abs(np.cumsum(np.sort(probs)[::-1]) - top_p).min() > NEAR:
        np.testing.assert_array_equal(is_kept, reference.kept_by_top_p(np.array(scores), top_p))


@settings(max_examples=50)
@given(scores=SCORES, min_p=st.floats(0.0, 1.0, width=32))
def test_min_p_keeps_tokens_probable_enough_beside_the_highest(
    sampler: Sampler, scores: list[float], min_p: float
) -> None:
    rows = torch.tensor([scores, scores])
    first, second = kept(sampler, rows, min_p=[min_p, 0.0])
    shares = np.exp(np.array(scores) - max(scores))
    is_clear = np.abs(shares - min_p) > NEAR
    expected = reference.kept_by_min_p(np.array(scores), min_p)
    np.testing.assert_array_equal(first.isfinite().numpy()[is_clear], expected[is_clear])
    assert first.isfinite().any()
    assert second.equal(rows[1])


@settings(max_examples=50)
@given(
    scores=SCORES,
    is_hidden=st.lists(st.booleans(), min_size=40, max_size=40),
    top_n_sigma=st.floats(0.0, 8.0, width=32),
    temperature=st.sampled_from([0.25, 1.0, 4.0]),
)
def test_top_n_sigma_keeps_scores_within_some_deviations_of_the_highest(
    sampler: Sampler,
    scores: list[float],
    is_hidden: list[bool],
    top_n_sigma: float,
    temperature: float,
) -> None:
    """Hidden logits excluded, at any temperature; with min_p the intersection."""
    row = torch.tensor(scores).masked_fill(torch.tensor(is_hidden[: len(scores)]), -torch.inf)
    row[0] = scores[0]
    rows, values = torch.stack([row] * 3), [top_n_sigma, top_n_sigma, 0.0]
    first, both, off = kept(
        sampler, rows, top_n_sigma=values, temperature=temperature, min_p=[0.0, 0.1, 0.0]
    )
    truth = row.double().numpy()
    expected = reference.kept_by_top_n_sigma(truth, top_n_sigma) & np.isfinite(truth)
    threshold = truth.max() - top_n_sigma * truth[np.isfinite(truth)].std()
    is_clear = (np.abs(truth - threshold) > NEAR) | (truth == truth.max())
    np.testing.assert_array_equal(first.isfinite().numpy()[is_clear], expected[is_clear])
    by_min_p = reference.kept_by_min_p(truth / temperature, 0.1)
    np.testing.assert_array_equal(both.isfinite(), first.isfinite().numpy() & by_min_p)
    assert off.equal(row / temperature)


@pytest.mark.parametrize("value", [0.05, 0.3, 0.9])
def test_filters_keep_the_same_tokens_as_transformers(sampler: Sampler, value: float) -> None:
    scores = torch.from_numpy(np.random.default_rng(7).normal(size=(20, 300)) * 3).float()
    top_k = int(value * 100)
    kept_by = {
        MinPLogitsWarper(value): kept(sampler, scores, min_p=value),
        TopKLogitsWarper(top_k): kept(sampler, scores, top_k=top_k),
        TopPLogitsWarper(value): kept(sampler, scores, top_p=value),
    }
    for warper, ours in kept_by.items():
        assert not ours.isfinite().all()
        assert ours.equal(warper(None, scores)), type(warper)


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_a_wide_and_a_narrow_nucleus_are_found_alike(sampler: Sampler, spread: float) -> None:
    """Beyond the first 128 tokens the row is sorted; the set is the same."""
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(4, 1000)) * spread).float()
    is_kept = kept(sampler, scores, top_p=0.8).isfinite().numpy()
    assert (is_kept.sum(-1) > filters.NUM_NUCLEUS_TRY).all() == (spread < 1)
    for row, row_kept in zip(scores.numpy(), is_kept, strict=True):
        np.testing.assert_array_equal(row_kept, reference.kept_by_top_p(row.astype(float), 0.8))


@settings(max_examples=30)
@given(data=st.data())
def test_a_mixed_batch_samples_like_the_reference_row_by_row(
    sampler: Sampler, data: st.DataObject
) -> None:
    num = data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    values = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], num).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 300], num),
        "top_p": rng.choice([1.0, 0.9, 0.2], num).astype(np.float32),
        "min_p": rng.choice([0.0, 0.01, 0.3], num).astype(np.float32),
        "top_n_sigma": rng.choice([0.0, 0.5, 1.9], num).astype(np.float32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, num),
        "positions": rng.integers(0, 10**6, num),
        "choices": rng.integers(0, 9, num),
    }
    vocab_size = data.draw(st.sampled_from([1, 2, 15, 16, 17, 200, 2001]))
    logits = rng.normal(size=(num, vocab_size)).astype(np.float32) * 6
    hidden = rng.random((num, vocab_size)) < data.draw(st.sampled_from([0.0, 0.1, 0.9]))
    hidden[:, 0] = False
    adjusted = np.where(hidden, -np.inf, logits).astype(np.float32)
    tokens = sampler.sample(
        torch.from_numpy(logits), torch.from_numpy(adjusted), random_rows(num, **values)
    )
    expected = [
        reference.sample_row(row, *(array[i].item() for array in values.values()))
        for i, row in enumerate(adjusted)
    ]
    assert tokens.dtype == np.int64
    assert tokens.tolist() == expected


def test_greedy_takes_the_lowest_of_equals(sampler: Sampler) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert drawn(sampler, logits, None) == [1, 0]
    assert drawn(sampler, torch.tensor([[-1.0, -0.0, 0.0]]), None) == [1]
    assert random_rows(2, temperature=[0.0, 9e-6]) is None
    mixed = random_rows(2, temperature=[0.0, 1.0], top_k=1)
    assert drawn(sampler, logits, mixed)[0] == 1


def test_the_lowest_temperature_that_samples_takes_the_highest(sampler: Sampler) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).permutation(900).astype(np.float32))[None]
    filters = {"top_p": 0.9, "min_p": 0.5, "top_k": 3, "top_n_sigma": 1.0}
    random = random_rows(1, temperature=MIN_TEMPERATURE, **filters)
    assert random is not None
    assert drawn(sampler, logits, random) == [int(logits.argmax())]
    assert kept(sampler, logits, temperature=MIN_TEMPERATURE, top_p=0.9).isfinite().sum() == 1


@pytest.mark.parametrize("vocab_size", [1, 16, 37, 400])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_cannot_be_sampled_has_a_code_in_place_of_a_token(
    sampler: Sampler, vocab_size: int, temperature: float
) -> None:
    """Rules may hide non-finite logits, or all logits."""
    num = vocab_size + 2
    logits = torch.zeros(num, vocab_size)
    wrong = torch.tensor([torch.nan, torch.inf, -torch.inf])
    logits[torch.arange(vocab_size), torch.arange(vocab_size)] = wrong[torch.arange(vocab_size) % 3]
    filters = {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "top_n_sigma": 1.0}
    random = random_rows(num, temperature=temperature, **filters)
    tokens = drawn(sampler, logits, random)
    assert tokens[:-2] == [NOT_FINITE] * vocab_size
    assert min(tokens[-2:]) >= 0
    adjusted = logits.nan_to_num(1.0, 1.0, 1.0)
    adjusted[[0, -2]] = -torch.inf
    tokens = sampler.sample(logits, adjusted, random).tolist()
    assert tokens[:-2] == [NOT_FINITE] * vocab_size
    assert tokens[-2] == NOTHING_LEFT
    assert tokens[-1] >= 0


def test_logits_of_some_tokens_are_checked_and_spread_ones_drawn_from(
    sampler: Sampler,
) -> None:
    rng = np.random.default_rng(4)
    ids = torch.from_numpy(np.sort(rng.permutation(400)[:37]))
    logits = torch.from_numpy(rng.normal(size=(6, 37)).astype(np.float32) * 4)
    spread = torch.full((6, 400), -torch.inf).index_copy_(1, ids, logits)
    random = random_rows(6, temperature=[0, 1, 0, 1, 0, 1], top_k=9, positions=np.arange(6))
    wanted = drawn(TorchSampler(), spread.nan_to_num(neginf=-1e6), random)
    logits[2, 36], logits[3, 0] = torch.nan, torch.inf
    wanted[2] = wanted[3] = NOT_FINITE
    assert sampler.sample(logits, spread, random).tolist() == wanted


def test_no_rows_are_no_tokens(sampler: Sampler) -> None:
    logits = torch.zeros(0, 9)
    assert drawn(sampler, logits, None) == []
    assert sampler.process(logits, None).shape == (0, 9)


@pytest.mark.parametrize("vocab_size", [700, 8192, 9001])
def test_the_kth_is_found_among_many_and_their_ties(sampler: Sampler, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    top_k = np.array([1, 2, 3, 50, 128, 500, vocab_size - 1, vocab_size, vocab_size + 1])
    for spread in (1, 5, 10**6):
        scores = np.round(rng.normal(size=(len(top_k), vocab_size)) * spread).astype(np.float32)
        found = kept(sampler, torch.from_numpy(scores), top_k=top_k).isfinite().numpy()
        for row, k, is_kept in zip(scores, top_k.tolist(), found, strict=True):
            np.testing.assert_array_equal(is_kept, reference.kept_by_top_k(row, k))


def test_a_row_samples_the_same_bits_alone_and_among_others(sampler: Sampler) -> None:
    num, rng = 40, np.random.default_rng(9)
    logits = torch.from_numpy(rng.normal(size=(num, 777)).astype(np.float32) * 3)
    values = {
        "temperature": rng.choice([0.0, 0.7, 1.0], num),
        "top_k": rng.choice([0, 30], num),
        "top_p": rng.choice([1.0, 0.9], num),
        "min_p": rng.choice([0.0, 0.01], num),
        "top_n_sigma": rng.choice([0.0, 2.0], num),
        "seeds": rng.integers(0, 2**62, num),
    }
    tokens = drawn(sampler, logits, random_rows(num, **values))
    scores = kept(sampler, logits, **values)
    for row in range(num):
        alone = {name: value[row] for name, value in values.items()}
        assert drawn(sampler, logits[row : row + 1], random_rows(1, **alone)) == [tokens[row]]
        assert kept(sampler, logits[row : row + 1], **alone)[0].equal(scores[row])


@pytest.mark.parametrize("varied", ["positions", "choices"])
def test_positions_and_choices_sample_independently(sampler: Sampler, varied: str) -> None:
    """Pairs of neighbouring draws over 4 equal tokens: 15 degrees of freedom, 99.9th is 37.7."""
    num = 16000
    random = random_rows(num, seeds=-77, **{varied: np.arange(num)})
    tokens = np.array(drawn(sampler, torch.zeros(num, 4), random))
    pairs = np.bincount(tokens[0::2] * 4 + tokens[1::2], minlength=16)
    expected = num / 2 / 16
    assert ((pairs - expected) ** 2 / expected).sum() < 37.7


def test_noise_stays_within_the_gap_that_is_skipped() -> None:
    noise = gumbel(torch.tensor([0, 1, 255, 256, 2**31, 2**32 - 1]))
    assert noise.isfinite().all()
    assert noise.max() - noise.min() < MAX_GAP
    assert (noise[2:].diff() > 0).all()


def test_skipped_tokens_would_not_have_won(sampler: Sampler) -> None:
    logits = np.random.default_rng(4).normal(size=(64, 500)).astype(np.float32) * 12
    tokens = drawn(sampler, torch.from_numpy(logits), random_rows(64, seeds=np.arange(64)))
    for row, token, seed in zip(logits, tokens, range(64), strict=True):
        assert token == (row.astype(float) + reference.noise(500, seed, 5, 0)).argmax()
