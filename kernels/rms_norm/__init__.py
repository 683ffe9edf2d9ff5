"""Root-mean-square norm (arXiv 1910.07467)."""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from kernels.dispatch import runs_triton


class Norm(NamedTuple):
    """The parameters of a norm, for operators that include one."""

    weight: Tensor  # [size], in float32 or the dtype of x
    eps: float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] of x's dtype or float32 → [..., size]; ``reference.py`` has the
    formula."""
    if runs_triton(x):
        from kernels.rms_norm.triton import launch

        return launch(x, weight, eps)
    if weight.dtype != x.dtype:
        return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return functional.rms_norm(x, weight.shape, weight, eps)
