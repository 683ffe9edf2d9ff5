"""``linear`` by torch's matmuls: for many rows, and without Triton."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.rms_norm import Norm, rms_norm


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    into: Tensor | None = None,
) -> Tensor:
    if norm is not None:
        x = rms_norm(x, *norm)
    if residual is None:
        return _product(x, weight, bias, out_dtype, into)
    if x.is_cpu:
        return residual.add_(functional.linear(x, weight, bias))
    # In one pass, rounded once. (addmm would copy the residual first.)
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    into: Tensor | None,
) -> Tensor:
    if x.is_cuda and out_dtype != x.dtype:
        out = torch.mm(x, weight.t(), out_dtype=out_dtype, out=into)
        return out if bias is None else out.add_(bias)
    if x.dtype != out_dtype or weight.dtype != out_dtype:
        x, weight = x.to(out_dtype), weight.to(out_dtype)
    out = functional.linear(x, weight, None if bias is None else bias.to(out_dtype))
    return out if into is None else into.copy_(out)
