"""The chosen experts of each token: gated feed-forward networks, and the weighted sum of them.

Decoding is bound by reading the weights of the experts that are hit, each of them once. Codes are
decoded on the way for any number of tokens.
"""

from collections.abc import Sequence

from torch import Tensor

from kernels.codes import Codes
from kernels.dispatch import runs_triton
from kernels.experts import plain
from kernels.experts.biases import Biases
from kernels.silu_mul import Clamp

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
    clamp: Clamp | None = None,
    first: int | None = None,
) -> Tensor:
    """residual + Σ weights[:, i] · down(silu(gate(x)) · up(x)) of the experts chosen[:, i]; with a
    ``clamp`` gates and ups are multiplied as it says.

    x [T, H], chosen [T, k] int32 and weights [T, k] float32 of ``route``, gate_up [E, 2 I, H],
    gates before ups, down [E, H, I], residual [T, H] → [T, H]. Weights of experts are dense or in
    codes: all in one, or one for each expert where torch's operators compute them, and so are
    biases. With ``first`` they are those of some experts, from that one on, and of these alone is
    the sum. A token's result is the same bits whatever else is in the step. Raises ValueError for
    what kernels cannot read.
    """
    if runs_triton(x):
        from kernels.experts.triton import launch

        return launch(x, chosen, weights, gate_up, down, residual, biases, clamp, first)
    return plain.experts(x, chosen, weights, gate_up, down, residual, biases, clamp, first)
