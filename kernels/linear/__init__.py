"""Products with a weight, and what stands around them in a decoder layer.

Up to ``FEW_TOKENS`` tokens the time is that of reading the weight: a kernel of our own reads it
once, and bias, residual and SwiGLU cost no pass of their own. More tokens are cuBLAS's. A norm is a
launch of its own: within the kernel each program would norm all tokens, and wait for the norm's
numbers behind those of the weight.

A weight may be in codes. The kernel decodes them on the way; for more tokens they are decoded into
memory of their own, as much as the dense weight is, before each product.
"""

import torch
from torch import Tensor

from kernels.codes import Codes, decoded, has_kernels
from kernels.dispatch import runs_triton
from kernels.linear import plain
from kernels.rms_norm import Norm, rms_norm
from kernels.silu_mul import CURVES, Act

FEW_TOKENS = 64  # decision 078


def linear(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(rms_norm(x) or x) @ weight.T + bias + residual.

    x [T, K], weight [N, K] with contiguous rows or in codes, bias [N] → [T, N] in ``out_dtype``, by
    default x's, or in ``out``, which has it. A residual [T, N] of x's dtype is added to in place,
    and is the result. Triton's kernel accumulates in float32 and rounds once; a token's result is
    the same bits for every T up to ``FEW_TOKENS``.
    """
    out_dtype = out_dtype or x.dtype
    x, weight, norm = _ordered(x, weight, norm)
    if _is_for_triton(x, weight):
        from kernels.linear.triton import launch_linear

        return launch_linear(_normed(x, norm), weight, bias, residual, out_dtype, out)
    decoded_as = x.dtype if x.is_cuda else out_dtype
    return plain.linear(x, _dense(weight, decoded_as), bias, norm, residual, out_dtype, out)


def gated(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    act: Act = "silu",
) -> Tensor:
    """act(gate) * up, where both are ``linear`` of x, or of the normed x.

    x [T, K], weight [2 I, K] and bias [2 I], gates before ups → [T, I].
    """
    x, weight, norm = _ordered(x, weight, norm)
    if _is_for_triton(x, weight):
        from kernels.linear.triton import launch_gated

        return launch_gated(_normed(x, norm), weight, bias, *CURVES[act])
    return plain.gated(x, _dense(weight, x.dtype), bias, norm, act)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, *norm)


def _ordered(
    x: Tensor, weight: Tensor | Codes, norm: Norm | None
) -> tuple[Tensor, Tensor | Codes, Norm | None]:
    """With inputs in the order of the weight's codes, where they have one, and normed then."""
    if not isinstance(weight, Codes) or weight.order is None or not runs_triton(x):
        return x, weight, norm
    return _normed(x, norm).index_select(1, weight.order), weight._replace(order=None), None


def _is_for_triton(x: Tensor, weight: Tensor | Codes) -> bool:
    is_known = not isinstance(weight, Codes) or has_kernels(weight)
    return is_known and runs_triton(x) and len(x) <= FEW_TOKENS


def _dense(weight: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    return decoded(weight, dtype) if isinstance(weight, Codes) else weight
