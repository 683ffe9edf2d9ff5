"""Samples have the requested distribution: chi-square over fixed seeds."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.library import variants
from kernels.sample import prepare_random_rows, reference
from kernels.sample.slot_params import SlotParams
from services.worker.step.sampler import Sampler

NUM_DRAWS = 300_000
LOGITS = np.random.default_rng(3).permutation(np.linspace(-2, 2.5, 24)).astype(np.float32)
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0}
DTYPES = {"top_k": np.int64}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_n_sigma": 1.5, "temperature": 1.8},
    {"temperature": 1.3, "top_k": 15, "top_p": 0.9, "min_p": 0.05, "top_n_sigma": 2.5},
]

WRONG: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"temperature": 1.02}),
    ({"temperature": 0.7}, {"temperature": 0.7 * 0.98}),
    ({"top_k": 7}, {"top_k": 8}),
    ({"top_k": 7}, {"top_k": 7, "temperature": 0.97}),
    ({"top_p": 0.8}, {"top_p": 0.85}),
    ({"min_p": 0.1}, {"min_p": 0.13}),
    ({"top_n_sigma": 1.5}, {"top_n_sigma": 1.6}),
]


def by_samplers(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """All ``cases`` by one variant of native code, as all draw the tokens of the reference
    (``test_sample.py``); torch takes seconds for each."""
    *others, last = variants()
    return [(last, *case) for case in cases] + [
        pytest.param(name, *case, marks=pytest.mark.slow)
        for name in ("torch", *others)
        for case in cases
    ]


def num_sampled(sampler: Sampler, logits: np.ndarray = LOGITS, **values: float) -> np.ndarray:
    """Counts of each sampled token, each sample with its own seed."""
    arrays = {
        name: np.full(NUM_DRAWS, value, DTYPES.get(name, np.float32))
        for name, value in (DEFAULTS | values).items()
    }
    seeds, positions = np.arange(NUM_DRAWS), np.full(NUM_DRAWS, 5)
    choices, device = np.zeros_like(seeds), torch.device("cpu")
    params = SlotParams(**arrays, seeds=seeds, choices=choices)
    random = prepare_random_rows(params, positions, device)
    rows = torch.from_numpy(logits).repeat(NUM_DRAWS, 1)
    return np.bincount(sampler.sample(rows, rows, random), minlength=len(logits))


def expected_shares(**values: Any) -> np.ndarray:
    """The distribution of LOGITS, 0 for filtered tokens, in the order of the filters."""
    values = DEFAULTS | values
    scores = LOGITS.astype(np.float64) / values["temperature"]
    for name in ("top_n_sigma", "min_p", "top_k", "top_p"):
        kept = getattr(reference, f"kept_by_{name}")(scores, values[name])
        scores = np.where(kept, scores, -np.inf)
    shares = np.exp(scores - scores.max())
    return shares / shares.sum()


def misfit(drawn: np.ndarray, shares: np.ndarray) -> float:
    """Chi-square over its 99.9th percentile; infinite if a filtered token was sampled."""
    if drawn[shares == 0].any():
        return np.inf
    drawn, expected = drawn[shares > 0], NUM_DRAWS * shares[shares > 0]
    return ((drawn - expected) ** 2 / expected).sum() / _percentile_999(len(drawn) - 1)


def _percentile_999(num_degrees: int) -> float:
    """Wilson and Hilferty (1931): within two percent from 4 degrees of freedom on."""
    part = 2 / (9 * num_degrees)
    return num_degrees * (1 - part + 3.0902 * sqrt(part)) ** 3


@pytest.mark.parametrize(
    ("sampler", "values"),
    by_samplers([(values,) for values in VARIANTS]),
    indirect=["sampler"],
    ids=str,
)
def test_samples_follow_the_requested_distribution(
    sampler: Sampler, values: dict[str, Any]
) -> None:
    shares = expected_shares(**values)
    assert (shares > 0).sum() >= 5
    assert misfit(num_sampled(sampler, **values), shares) < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "values", "wrong"),
    by_samplers(WRONG),
    indirect=["sampler"],
    ids=str,
)
def test_samples_that_are_off_by_a_few_percent_are_found(
    sampler: Sampler, values: dict[str, Any], wrong: dict[str, Any]
) -> None:
    assert misfit(num_sampled(sampler, **wrong), expected_shares(**values)) > 1


@pytest.mark.parametrize(("sampler", "factor"), by_samplers([(1.05,)]), indirect=["sampler"])
def test_one_token_that_comes_five_percent_too_often_is_found(
    sampler: Sampler, factor: float
) -> None:
    logits = LOGITS.copy()
    logits[logits.argmax()] += np.log(factor)
    assert misfit(num_sampled(sampler, logits), expected_shares()) > 1
