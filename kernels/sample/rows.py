"""The rows of a step that are drawn at random, and how."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIN_TEMPERATURE = 1e-5  # below it a row is greedy


@dataclass(frozen=True, slots=True)
class RandomRows:
    """N of the S rows of logits. What the host knows decides which filters run at all."""

    rows: Tensor  # [N] int64
    temperature: Tensor  # [N] float32
    top_k: Tensor  # [N] int64, 0 keeps all
    top_p: Tensor  # [N] float32, 1 keeps all
    min_p: Tensor  # [N] float32, 0 keeps all
    seeds: Tensor  # [N] int64
    positions: Tensor  # [N] int64, the sampled token's index in the whole sequence
    choices: Tensor  # [N] int64
    max_top_k: int
    has_top_p: bool
    has_min_p: bool


def prepare_random_rows(
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    seeds: np.ndarray,
    positions: np.ndarray,
    choices: np.ndarray,
    device: torch.device,
) -> RandomRows | None:
    """All arrays are [S], in the order of the logits; None where every row is greedy."""
    rows = np.flatnonzero(temperature >= MIN_TEMPERATURE)
    if not len(rows):
        return None

    def take(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array[rows]).to(device, non_blocking=True)

    return RandomRows(
        torch.from_numpy(rows).to(device, non_blocking=True),
        take(temperature),
        take(top_k),
        take(top_p),
        take(min_p),
        take(seeds),
        take(positions),
        take(choices),
        max_top_k=int(top_k[rows].max()),
        has_top_p=bool((top_p[rows] < 1).any()),
        has_min_p=bool((min_p[rows] > 0).any()),
    )
