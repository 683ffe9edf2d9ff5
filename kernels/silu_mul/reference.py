"""Reference of ``silu_mul``."""

import math

import torch
from torch import Tensor

from kernels.silu_mul import Act, Clamp


def silu_mul(gate_up: Tensor, act: Act | Clamp = "silu") -> Tensor:
    """In float64, rounded once at the end."""
    if act == "relu2":
        return gate_up.double().clamp(min=0).square().to(gate_up.dtype)
    gate, up = gate_up.double().chunk(2, -1)
    if isinstance(act, Clamp):
        gate, up = gate.clamp(max=act.limit), up.clamp(min=-act.limit, max=act.limit) + 1
        opened = gate / (1 + torch.exp(-act.alpha * gate))
    elif act == "silu":
        opened = gate / (1 + torch.exp(-gate))
    else:
        bent = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))
        opened = gate / 2 * (1 + bent)
    return (opened * up).to(gate_up.dtype)
