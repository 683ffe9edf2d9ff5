"""The product in the middle of a gated feed-forward network (SwiGLU, arXiv 2002.05202)."""

from torch import Tensor
from torch.nn import functional

from kernels.dispatch import runs_triton


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I], gates before ups → silu(gate) * up [T, I]."""
    if runs_triton(gate_up):
        from kernels.silu_mul.triton import launch

        return launch(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up
