"""Weights of products in codes of a few bits."""

import torch
from torch import Tensor

from kernels.codes.form import Codes, first_of, has_kernels
from kernels.dispatch import runs_triton

__all__ = ["Codes", "decoded", "first_of", "has_kernels"]


def decoded(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``codes.values``. Triton's kernel, which wants no memory besides, has no order."""
    if runs_triton(codes.codes) and has_kernels(codes) and codes.order is None:
        from kernels.codes.triton import launch_decode

        return launch_decode(codes, dtype)
    return codes.values(dtype)
