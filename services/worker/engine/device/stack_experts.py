"""Puts the weights of a layer's experts into one, as kernels of GPUs read them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kernels.codes import has_kernels
from services.worker.layers.experts import Experts
from services.worker.layers.linear import Linear
from services.worker.layers.ops import NotSupported
from services.worker.layers.weights import Quantized, stack

MULTIPLE = 8  # of sizes that kernels read


def stack_experts(module: nn.Module, path: str = "") -> None:
    """Stacks the unstacked experts in ``module``, named ``path``, one layer after the other, so
    that this needs extra memory for one layer at most. Raises NotSupported, with the layer's name,
    if kernels cannot read them."""
    for name, experts in module.named_modules(prefix=path):
        if isinstance(experts, Experts) and experts.stacks is None:
            try:
                _stack([each.gate_up_proj for each in experts.products])
                _stack([each.down_proj for each in experts.products])
            except ValueError as problem:
                raise NotSupported(f"{name}: {problem}") from None
            experts.find_stacks()
            torch.cuda.empty_cache()  # frees the experts' separate tensors


def _stack(linears: Sequence[Linear]) -> None:
    """Raises ValueError."""
    first = linears[0]
    sizes = first.outputs, first.inputs
    if any(size % MULTIPLE for size in sizes):
        raise ValueError(f"experts of {sizes} outputs and inputs, no multiples of {MULTIPLE}")
    stack([linear.weight for linear in linears])
    weight = first.weight
    if isinstance(weight, Quantized) and not has_kernels(weight.as_codes):
        raise ValueError(f"experts in codes with groups of {weight.group} inputs")
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    if biases:
        for linear, bias in zip(linears, torch.stack(biases), strict=True):
            linear.bias = nn.Parameter(bias, requires_grad=False)
