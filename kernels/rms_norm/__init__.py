"""Root-mean-square norm (arXiv 1910.07467)."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from kernels.dispatch import runs_triton


class Norm(NamedTuple):
    """What a norm is made of, for operators that have it within."""

    weight: Tensor  # [size], in float32 or as what it norms
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] of x's type or float32 → [..., size]; the formula is in
    ``reference.py``."""
    if runs_triton(x):
        from kernels.rms_norm.triton import launch

        return launch(x, weight, eps)
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)
