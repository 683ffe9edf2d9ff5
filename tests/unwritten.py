"""Unwritten memory holds NaN, or a huge integer. Zeros would hide an operator that reads it, or
leaves a part of its result unwritten."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._device import _device_constructors

HUGE = 2**30 + 7


def poison(patch: pytest.MonkeyPatch) -> None:
    """Patches torch's functions for Python callers; torch's own code is unchanged."""
    _device_constructors()  # permanently caches the constructors for ``with torch.device``
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
