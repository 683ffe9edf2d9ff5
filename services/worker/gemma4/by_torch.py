"""Operators of Gemma 4 that torch computes, and native code lacks."""

from collections.abc import Callable
from typing import cast

from torch import Tensor
from torch.nn import functional

from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.ops import NotSupported, Ops, X


def by_torch(ops: Ops[X], compute: Callable[..., Tensor], *inputs: X) -> X:
    """compute(ops, *inputs). Raises NotSupported for native code."""
    if not isinstance(ops, TorchOps):
        raise NotSupported("it lacks Gemma 4's operators, as the norm of values")
    return cast(X, compute(ops, *inputs))


def normed(x: Tensor, eps: float) -> Tensor:
    """The root-mean-square norm of x [..., size] without a weight."""
    return functional.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
