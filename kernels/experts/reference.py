"""The readable truth of ``experts``."""

import torch
from torch import Tensor
from torch.nn import functional


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """All in float64, and [T, H] in float64; weights of experts are dense."""
    out = torch.zeros_like(x, dtype=torch.float64) if residual is None else residual.double()
    rows = []
    for token, row in enumerate(out):
        for expert, weight in zip(chosen[token].tolist(), weights[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            row = row + weight * (down[expert].double() @ (functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows) if rows else out
