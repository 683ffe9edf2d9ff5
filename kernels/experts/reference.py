"""Reference of ``experts``."""

import torch
from torch import Tensor

from kernels.experts.biases import Biases
from kernels.silu_mul import Act, Clamp
from kernels.silu_mul.reference import silu_mul


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor | None = None,
    biases: Biases | None = None,
    act: Act | Clamp = "silu",
) -> Tensor:
    """Computes in float64; weights of experts are dense. Returns [T, H] float64."""
    out = torch.zeros_like(x, dtype=torch.float64) if residual is None else residual.double()
    rows = []
    for token, row in enumerate(out):
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            both = gate_up[expert].double() @ x[token].double()
            if biases is not None:
                both = both + biases.gate_up[expert].double()
            given = down[expert].double() @ silu_mul(both, act)
            if biases is not None and biases.down is not None:
                given = given + biases.down[expert].double()
            row = row + weight * given
        rows.append(row)
    return torch.stack(rows) if rows else out
