"""Linear layers, fused with the operations around them in a decoder layer.

Up to ``FEW_TOKENS`` tokens, reading the weight dominates. Our kernel reads it once, and fuses bias,
residual and SwiGLU. cuBLAS serves more tokens. A norm is a separate launch: inside the GEMM every
program would norm all tokens, and wait for the norm's elements after those of the weight.

A quantized weight is dequantized inside the kernel. For more tokens it is first dequantized into
temporary memory of the dense weight's size.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.codes import Codes, decoded, has_kernels
from kernels.dispatch import runs_triton
from kernels.rms_norm import Norm, rms_norm
from kernels.silu_mul import CURVES, Act, silu_mul

FEW_TOKENS = 64  # decision 071


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

    x [T, K], weight [N, K] quantized or with contiguous rows, bias [N] → [T, N] in ``out_dtype``,
    by default x's, or in ``out``. A residual [T, N] of x's dtype is updated in place and returned.
    Triton's kernel accumulates in float32 and rounds once; a token's result has the same bits for
    every T up to ``FEW_TOKENS``.
    """
    out_dtype = out_dtype or x.dtype
    x, weight, norm = _ordered(x, weight, norm)
    if _is_for_triton(x, weight):
        from kernels.linear.triton import launch_linear

        return launch_linear(_normed(x, norm), weight, bias, residual, out_dtype, out)
    decoded_as = x.dtype if x.is_cuda else out_dtype
    x, weight = _normed(x, norm), _dense(weight, decoded_as)
    if residual is None:
        return _product(x, weight, bias, out_dtype, out)
    if x.is_cpu:
        return residual.add_(functional.linear(x, weight, bias))
    # In one pass, rounded once. (addmm would copy the residual first.)
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def gated(
    x: Tensor,
    weight: Tensor | Codes,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    act: Act = "silu",
    add: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """act(gate) * up, both ``linear`` of x or of the normed x.

    x [T, K], weight [2 I, K] and bias [2 I], gates before ups → [T, I]; without gates [I, K], [I].
    ``add`` adds to gates and ups [T, 2 I] in place; rows it leaves alone have the same bits as
    without it.
    """
    x, weight, norm = _ordered(x, weight, norm)
    if act in CURVES and _is_for_triton(x, weight):
        from kernels.linear.triton import launch_gated

        deltas = None
        if add is not None:
            deltas = x.new_zeros(len(x), weight.shape[0], dtype=torch.float32)
            add(deltas)
        return launch_gated(_normed(x, norm), weight, bias, deltas, *CURVES[act])
    products = linear(x, weight, bias, norm=norm)
    if add is not None:
        add(products)
    return silu_mul(products, act)


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, into: Tensor | None
) -> Tensor:
    """By torch's matmuls: for many rows, and without Triton."""
    if x.is_cuda and out_dtype != x.dtype:
        out = torch.mm(x, weight.t(), out_dtype=out_dtype, out=into)
        return out if bias is None else out.add_(bias)
    if x.dtype != out_dtype or weight.dtype != out_dtype:
        x, weight = x.to(out_dtype), weight.to(out_dtype)
    out = functional.linear(x, weight, None if bias is None else bias.to(out_dtype))
    return out if into is None else into.copy_(out)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else rms_norm(x, *norm)


def _ordered(
    x: Tensor, weight: Tensor | Codes, norm: Norm | None
) -> tuple[Tensor, Tensor | Codes, Norm | None]:
    """Permutes (and norms) the inputs into the order of the weight's codes, if they have one."""
    if not isinstance(weight, Codes) or weight.order is None or not runs_triton(x):
        return x, weight, norm
    return _normed(x, norm).index_select(1, weight.order), weight._replace(order=None), None


def _is_for_triton(x: Tensor, weight: Tensor | Codes) -> bool:
    is_known = not isinstance(weight, Codes) or has_kernels(weight)
    return is_known and runs_triton(x) and len(x) <= FEW_TOKENS


def _dense(weight: Tensor | Codes, dtype: torch.dtype) -> Tensor:
    return decoded(weight, dtype) if isinstance(weight, Codes) else weight
