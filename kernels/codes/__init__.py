"""Weights of products in codes of a few bits."""

import torch
from torch import Tensor

from kernels.codes.form import Codes, first_of, has_kernels
from kernels.dispatch import runs_triton

__all__ = ["Codes", "decoded", "decoded_rows", "first_of", "has_kernels"]


def decoded(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``codes.values``. Triton's kernel, which wants no memory besides, has no order."""
    if _is_for_triton(codes):
        from kernels.codes.triton import launch_decode

        return launch_decode(codes, dtype)
    return codes.values(dtype)


def decoded_rows(codes: Codes, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Those of ``codes.values`` that are the outputs ``ids`` [T], all of which there are:
    [T, inputs]."""
    if _is_for_triton(codes):
        from kernels.codes.triton import launch_decode

        return launch_decode(codes, dtype, ids)
    return codes.rows(ids).values(dtype)


def _is_for_triton(codes: Codes) -> bool:
    return runs_triton(codes.codes) and has_kernels(codes) and codes.order is None
