"""The weights of a layer's experts in one, as kernels of GPUs read them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.codes import Codes, has_kernels
from services.worker.layers.experts import Experts, Stacks
from services.worker.layers.linear import Linear
from services.worker.layers.ops import NotSupported
from services.worker.layers.weights import stacked
from services.worker.models.decoder import DecoderLM

MULTIPLE = 8  # of sizes that kernels read


def stack_experts(model: DecoderLM) -> None:
    """One layer after the other, so that beside the model there is memory for one at most. Raises
    NotSupported, with the layer's name, where kernels cannot read them."""
    for name, experts in model.named_modules():
        if isinstance(experts, Experts):
            try:
                experts.stacks = Stacks(
                    _stacked([each.gate_up_proj for each in experts.products]),
                    _stacked([each.down_proj for each in experts.products]),
                )
            except ValueError as problem:
                raise NotSupported(f"{name}: {problem}") from None
            torch.cuda.empty_cache()  # of what each expert had


def _stacked(linears: Sequence[Linear]) -> Tensor | Codes:
    """Raises ValueError."""
    sizes = linears[0].outputs, linears[0].inputs
    if any(size % MULTIPLE for size in sizes):
        raise ValueError(f"experts of {sizes} outputs and inputs, no multiples of {MULTIPLE}")
    weights = stacked([linear.weight for linear in linears])
    if isinstance(weights, Codes) and not has_kernels(weights):
        raise ValueError(f"experts in codes with groups of {weights.group} inputs")
    return weights
