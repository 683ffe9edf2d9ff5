"""Memory that was allocated and not written holds NaN, or a huge integer, where it may hold zeros
otherwise and an operator that reads it, or leaves a part of its result, would go unnoticed."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

HUGE = 2**30 + 7


def poison(patch: pytest.MonkeyPatch) -> None:
    """Of torch's functions, as Python calls them; torch's own code is not changed."""
    _device_constructors()  # keeps for ever, for ``with torch.device``, what it first finds
    for name in ("empty", "empty_like", "empty_strided"):
        patch.setattr(torch, name, filled(getattr(torch, name)))
    patch.setattr(torch.Tensor, "new_empty", filled(torch.Tensor.new_empty))


def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(allocate)
    def allocate_and_fill(*args: Any, **options: Any) -> Tensor:
        tensor = allocate(*args, **options)
        if tensor.is_floating_point():
            return tensor.fill_(torch.nan)
        if tensor.dtype in (torch.int32, torch.int64):
            return tensor.fill_(HUGE)
        return tensor

    return allocate_and_fill
