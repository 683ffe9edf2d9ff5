"""Reference of ``linear`` and ``gated``."""

from torch import Tensor

from kernels.rms_norm import Norm
from kernels.rms_norm.reference import rms_norm
from kernels.silu_mul import Act
from kernels.silu_mul.reference import silu_mul


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Computes and returns float32 [T, N]."""
    wide = x.float() if norm is None else rms_norm(x.float(), *norm)
    out = wide @ weight.float().T
    for term in (bias, residual):
        out = out if term is None else out + term.float()
    return out


def gated(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm, act: Act = "silu"
) -> Tensor:
    """Computes and returns float32 [T, I]."""
    return silu_mul(linear(x, weight, bias, norm=norm), act)
