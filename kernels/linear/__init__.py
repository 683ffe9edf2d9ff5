"""Products with a weight, and what stands around them in a decoder layer.

Up to ``MAX_FEW_ROWS`` tokens the time is that of reading the weight: a kernel of our own reads it
once, and norm, bias, residual and SwiGLU cost no pass of their own. More tokens are cuBLAS's.
"""

import torch
from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.linear import plain
from kernels.rms_norm import Norm, rms_norm

MAX_FEW_ROWS = 64  # not measured yet


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(rms_norm(x) or x) @ weight.T + bias + residual.

    x [T, K], weight [N, K] with contiguous rows, bias [N], residual [T, N] → [T, N] in
    ``out_dtype``, by default x's, or in ``out``, which has it. Triton's kernel accumulates in
    float32 and rounds once; a token's result is the same bits for every T up to ``MAX_FEW_ROWS``.
    Its norm rounds x * norm.weight and scales the product, where ``rms_norm`` rounds when it has
    scaled: as exact, not the same bits.
    """
    out_dtype = out_dtype or x.dtype
    if _is_for_triton(x):
        from kernels.linear.triton import launch_linear

        x, norm = _normed(x, norm)
        return launch_linear(x, weight, bias, norm, residual, out_dtype, out)
    return plain.linear(x, weight, bias, norm, residual, out_dtype, out)


def gated(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: Norm | None = None
) -> Tensor:
    """silu(gate) * up, where both are ``linear`` of x, or of the normed x.

    x [T, K], weight [2 I, K] and bias [2 I], gates before ups → [T, I].
    """
    if _is_for_triton(x):
        from kernels.linear.triton import launch_gated

        return launch_gated(*_normed(x, norm), weight, bias)
    return plain.gated(x, weight, bias, norm)


def _normed(x: Tensor, norm: Norm | None) -> tuple[Tensor, Norm | None]:
    """Normed already where it is float16: what is scaled after the product would overflow in it."""
    if norm is None or x.dtype != torch.float16:
        return x, norm
    return rms_norm(x, *norm), None


def _is_for_triton(x: Tensor) -> bool:
    return runs_triton(x) and len(x) <= MAX_FEW_ROWS
