"""The sampling parameters of each slot, as they lie on the device."""

from typing import NamedTuple

from torch import Tensor


class SlotParams(NamedTuple):
    """How each of N slots draws."""

    temperature: Tensor  # [N] float32, below MIN_TEMPERATURE greedy
    top_k: Tensor  # [N] int32, 0 keeps all
    top_p: Tensor  # [N] float32, 1 keeps all
    min_p: Tensor  # [N] float32, 0 keeps all
    seeds: Tensor  # [N] int64
    choices: Tensor  # [N] int32
