"""Sampling parameters as columns: an entry for each of N slots or rows."""

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


class SlotParams(NamedTuple, Generic[T]):
    """Sampling parameters of N slots or rows: numpy arrays on the host, tensors on a device.

    A parameter is declared here; ``COLUMNS`` gives its dtypes, and all code that holds or moves
    parameters iterates over the fields. ``RandomRows`` in ``sampler.cpp`` has the same fields.
    """

    temperature: T  # below MIN_TEMPERATURE greedy
    top_k: T  # 0 keeps all
    top_p: T  # 1 keeps all
    min_p: T  # 0 keeps all
    top_n_sigma: T  # 0 keeps all
    seeds: T
    choices: T


# As SamplingParams names them; Triton's kernels take them in this order. The other fields select
# the random bits.
FILTERS = ("temperature", "top_k", "top_p", "min_p", "top_n_sigma")


class Column(NamedTuple):
    host: type[np.generic]
    device: torch.dtype
    default: float = 0


COLUMNS = SlotParams(
    temperature=Column(np.float32, torch.float32),
    top_k=Column(np.int64, torch.int32),
    top_p=Column(np.float32, torch.float32, default=1),
    min_p=Column(np.float32, torch.float32),
    top_n_sigma=Column(np.float32, torch.float32),
    seeds=Column(np.int64, torch.int64),
    choices=Column(np.int64, torch.int32),
)


def host_params(num: int) -> SlotParams[np.ndarray]:
    return SlotParams(*(np.full(num, each.default, each.host) for each in COLUMNS))


def device_params(num: int, device: torch.device) -> SlotParams[Tensor]:
    return SlotParams(
        *(torch.full((num,), each.default, dtype=each.device, device=device) for each in COLUMNS)
    )
