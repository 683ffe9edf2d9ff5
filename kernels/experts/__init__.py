"""The chosen experts of each token: feed-forward networks and the weighted sum of their
outputs.

Decoding is bound by reading the weights of the used experts, each once. Quantized weights are
dequantized inside the GEMM for any number of tokens.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.codes import Codes
from kernels.dispatch import runs_triton
from kernels.experts import plain
from kernels.experts.biases import Biases
from kernels.silu_mul import Act, Clamp

__all__ = ["Biases", "Clamp", "Weights", "experts"]

Weights = Tensor | Codes | Sequence[Tensor | Codes]


def experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Weights,
    down: Weights,
    *,
    residual: Tensor | None = None,
    biases: Biases | None = None,
    act: Act | Clamp = "silu",
    first: int | None = None,
) -> Tensor:
    """residual + Σ weights[:, i] · down(act(gate(x)) · up(x)) over the experts chosen[:, i].

    x [T, H], chosen [T, k] int32 and weights [T, k] float32 of ``route``, gate_up [E, 2 I, H] with
    gates before ups or [E, I, H] without, down [E, H, I], residual [T, H] → [T, H]. Expert weights
    and biases are stacked or, for torch's operators, one per expert; weights may be quantized. With
    ``first`` they are a range of experts from that index on, and only these are summed. A token's
    result has the same bits for every batch. Raises ValueError for arguments the kernels cannot
    read.
    """
    if runs_triton(x):
        from kernels.experts.triton import launch

        return launch(x, chosen, weights, gate_up, down, residual, biases, act, first)
    return plain.experts(x, chosen, weights, gate_up, down, residual, biases, act, first)
