"""Quantized weights with codes of 8 or 4 bits."""

import torch
from torch import Tensor

from kernels.codes.form import Codes, first_of, has_kernels
from kernels.dispatch import runs_triton

__all__ = ["Codes", "decoded", "decoded_rows", "first_of", "has_kernels"]


def decoded(codes: Codes, dtype: torch.dtype) -> Tensor:
    """``codes.values``, by Triton's kernel (which needs no temporary memory) unless there is an
    order."""
    if _is_for_triton(codes):
        from kernels.codes.triton import launch_decode

        return launch_decode(codes, dtype)
    return codes.values(dtype)


def decoded_rows(codes: Codes, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows ``ids`` [T] of ``codes.values``: [T, inputs]. All ids must exist."""
    if _is_for_triton(codes):
        from kernels.codes.triton import launch_decode

        return launch_decode(codes, dtype, ids)
    return codes.rows(ids).values(dtype)


def _is_for_triton(codes: Codes) -> bool:
    return runs_triton(codes.codes) and has_kernels(codes) and codes.order is None
