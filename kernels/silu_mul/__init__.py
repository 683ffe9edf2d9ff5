"""The elementwise product of a gated feed-forward network (SwiGLU and GEGLU, arXiv 2002.05202).

``Act`` is SiLU, or the tanh approximation of GELU (arXiv 1606.08415). Both are x · σ(α x + β x³),
with the constants of ``CURVES``. A network with max(x, 0)² (``relu2``, arXiv 2109.08668) has no
gates.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import runs_triton

Act = Literal["silu", "gelu_tanh", "relu2"]
CURVES: dict[Act, tuple[float, float]] = {
    "silu": (1.0, 0.0),
    "gelu_tanh": (1.5957691216057308, 0.07135481627260025),  # 2 √(2 / π), and 0.044715 times that
}


class Clamp(NamedTuple):
    """gpt-oss's (up + 1) · gate · σ(``alpha`` · gate), with gates ≤ ``limit`` and ups within
    ± ``limit``."""

    alpha: float
    limit: float


def silu_mul(gate_up: Tensor, act: Act | Clamp = "silu") -> Tensor:
    """gate_up [T, 2 I], gates before ups → act(gate) * up [T, I], or as defined by a ``Clamp``.
    ``relu2`` is of all numbers."""
    if act == "relu2":
        return functional.relu(gate_up).square()
    if runs_triton(gate_up):
        from kernels.silu_mul.triton import launch

        return launch(gate_up, *constants_of(act))
    gate, up = gate_up.chunk(2, dim=-1)
    if isinstance(act, Clamp):
        gate, up = gate.float().clamp(max=act.limit), up.float().clamp(-act.limit, act.limit)
        return ((up + 1) * gate * _sigmoid_by_rows(gate * act.alpha)).to(gate_up.dtype)
    opened = functional.silu(gate) if act == "silu" else functional.gelu(gate, approximate="tanh")
    return opened * up


def _sigmoid_by_rows(x: Tensor) -> Tensor:
    """Torch rounds the last numbers of a contiguous run otherwise than the others. Runs are rows
    here, so a row has the same bits for every number of rows."""
    out = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)[..., :-1]
    return torch.sigmoid(x, out=out)


def constants_of(act: Act | Clamp) -> tuple[float, float, float | None]:
    """α, β and the clamp's limit; α is 0 without gates."""
    if isinstance(act, Clamp):
        return act.alpha, 0.0, act.limit
    return (*CURVES.get(act, (0.0, 0.0)), None)


def num_parts(act: Act | Clamp) -> int:
    """2, gates and ups, or 1."""
    return 1 if act == "relu2" else 2
