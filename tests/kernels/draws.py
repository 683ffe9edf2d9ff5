"""Sampling parameters of slots, and the reference's results."""

from itertools import product

import numpy as np
import torch

from kernels.sample import reference
from kernels.sample.slot_params import FILTERS, SlotParams

TEMPERATURES, TOP_K = [0.0, 0.3, 1.0, 2.5], [0, 1, 5, 300]
TOP_P, MIN_P, TOP_N_SIGMA = [1.0, 0.9, 0.2], [0.0, 0.01, 0.3], [0.0, 0.5, 1.9]
DTYPES = {"top_k": np.int32, "choices": np.int32, "seeds": np.int64}


def slot_params(rng: np.random.Generator, num_slots: int, **values: float) -> SlotParams:
    """One combination per slot, in any order, with the given values fixed."""
    mixtures = rng.permutation(list(product(TEMPERATURES, TOP_K, TOP_P, MIN_P, TOP_N_SIGMA)))
    mixed = np.resize(mixtures, (num_slots, len(FILTERS)))
    drawn = {
        **dict(zip(FILTERS, mixed.T, strict=True)),
        "seeds": rng.integers(-(2**63), 2**63 - 1, num_slots),
        "choices": rng.integers(0, 9, num_slots),
    }
    given = {name: np.full(num_slots, value) for name, value in values.items()}
    arrays = {
        name: array.astype(DTYPES.get(name, np.float32)) for name, array in (drawn | given).items()
    }
    return SlotParams(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def moved(params: SlotParams, device: torch.device) -> SlotParams:
    return SlotParams(*(values.to(device) for values in params))


def expected_token(row: np.ndarray, params: SlotParams, slot: int, position: int) -> int:
    *first, choice = (values[slot].item() for values in params)
    return reference.sample_row(row, *[*first, position, choice])


def expected_scores(row: np.ndarray, params: SlotParams, slot: int) -> np.ndarray:
    temperature, top_k, top_p, min_p, top_n_sigma, *_ = (values[slot].item() for values in params)
    if temperature == 0:
        return row
    scores = row / np.float32(temperature)
    for keep, value in (
        (reference.kept_by_top_n_sigma, top_n_sigma),
        (reference.kept_by_min_p, min_p),
        (reference.kept_by_top_k, top_k),
        (reference.kept_by_top_p, top_p),
    ):
        scores = np.where(keep(scores.astype(float), value), scores, -np.inf)
    return scores
