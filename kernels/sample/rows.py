"""The randomly sampled rows of a step and their parameters."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.sample.slot_params import SlotParams

MIN_TEMPERATURE = 1e-5  # below it a row is greedy


@dataclass(frozen=True, slots=True)
class RandomRows:
    """N of the S rows of logits."""

    rows: Tensor  # [N] int64
    positions: Tensor  # [N] int64, the sampled token's index in the whole sequence
    params: SlotParams[Tensor]  # each [N], with the host's dtypes
    on_host: SlotParams[np.ndarray]  # the same on the host: decides which filters run


def prepare_random_rows(
    params: SlotParams[np.ndarray], positions: np.ndarray, device: torch.device
) -> RandomRows | None:
    """The rows that are not greedy, or None if all are. Arrays are [S], in the order of the
    logits."""
    rows = np.flatnonzero(params.temperature >= MIN_TEMPERATURE)
    if not len(rows):
        return None

    taken = SlotParams(*(each[rows] for each in params))

    def upload(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return RandomRows(
        rows=upload(rows),
        positions=upload(positions[rows]),
        params=SlotParams(*map(upload, taken)),
        on_host=taken,
    )
