"""Modules of transformers with weights in codes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels.codes import Codes, first_of, has_kernels
from kernels.experts import experts
from kernels.linear import linear
from services.worker.layers.weights import Dense, Quantized, Weight, stack, stack_of

KERNEL_MULTIPLE = 8  # of the sizes of experts on GPUs
# The layout of experts' weights by transformers' attributes, as these kernels read it.
LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}


class CodedLinear(nn.Module):
    """``nn.Linear`` with a weight that ``fill`` gives it. Before that, it has a tensor in its place
    that transformers takes for initialised."""

    def __init__(self, replaced: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.bias = replaced.bias
        stand_in: Any = torch.empty(0)
        stand_in._is_hf_initialized = True
        self.weight: Any = stand_in

    def fill(self, weight: Weight) -> None:
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """[…, inputs] → […, outputs]"""
        weight: Weight = self.weight
        values = weight.values if isinstance(weight, Dense) else weight.as_codes
        rows = x.reshape(-1, self.in_features)
        return linear(rows, values, self.bias).view(*x.shape[:-1], self.out_features)


class ExpertStack(nn.Module):
    """The codes of one weight of all experts. Raises ValueError if they are not in one form."""

    def __init__(self, parts: Sequence[Quantized]) -> None:
        super().__init__()
        stack(parts)
        found = stack_of(parts[0], len(parts))
        assert isinstance(found, Codes)
        self.codes = nn.Parameter(found.codes, requires_grad=False)
        self.scales = nn.Parameter(found.scales, requires_grad=False)
        for name in ("zeros", "table", "order"):
            self.register_buffer(name, getattr(found, name))
        self._sizes = found.inputs, found.group, first_of(found.table)

    @property
    def as_codes(self) -> Codes:
        inputs, group, first = self._sizes
        zeros, table, order = (getattr(self, name) for name in ("zeros", "table", "order"))
        return Codes(self.codes, self.scales, zeros, table, inputs, group, order, first)


def stack_experts(weights: Sequence[Weight], device: str) -> ExpertStack | None:
    """None if they are not codes in one form, or kernels of this ``device`` cannot read them."""
    coded = [each for each in weights if isinstance(each, Quantized)]
    if len(coded) < len(weights):
        return None
    try:
        found = ExpertStack(coded)
    except ValueError:
        return None
    codes = found.as_codes
    sizes_fit = not any(size % KERNEL_MULTIPLE for size in codes.shape[1:])
    return found if device == "cpu" or (sizes_fit and has_kernels(codes)) else None


class CodedExperts(nn.Module):
    """Replaces a module of experts whose gates are opened by SiLU."""

    def __init__(self, gate_up: ExpertStack, down: ExpertStack) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[…, hidden], chosen [T, k] and their weights [T, k] → […, hidden]"""
        rows = x.reshape(-1, x.shape[-1])
        ids = chosen.reshape(len(rows), -1).int()
        factors = weights.reshape(len(rows), -1).float()
        return experts(rows, ids, factors, self.gate_up.as_codes, self.down.as_codes).view(x.shape)


def has_plain_experts(module: Any) -> bool:
    """True for gates and ups in one weight, gates first, and SiLU: judged by its outputs."""
    if any(getattr(module, name, None) is not value for name, value in LAYOUT.items()):
        return False
    gates = torch.linspace(-20, 20, 64)
    both = torch.cat((gates, gates.flip(0) * 100))
    return torch.equal(module._apply_gate(both), functional.silu(gates) * both[64:])
