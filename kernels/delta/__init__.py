"""The gated delta rule with its convolution and its gated norm (arXiv 2412.06464, Qwen3-Next),
Mamba-2's rule (arXiv 2405.21060), which lacks the correction, Kimi's (arXiv 2510.26692), and
lightning attention (arXiv 2401.04658).

A value head h has a matrix S [key_dim, value_dim], part of its sequence's state; it shares the key
head h // (num_value_heads // num_key_heads). A token's input is (q, k, v, z), and (b, a) of each
value head. In float32, token by token:

1. (q, k, v) ← silu(Σ_j conv[:, j] · (q, k, v) of the token ``width − 1 − j`` places before)
2. q ← q / √(Σ q² + 1e-6) / √key_dim and k ← k / √(Σ k² + 1e-6), each over its head
3. S ← exp(−exp(A_log) · softplus(a + dt_bias)) · S
4. S ← S + k ⊗ sigmoid(b) · (v − Sᵀ k)
5. y = Sᵀ q
6. out = norm · y / √(mean(y²) + eps) · silu(z)

With ``ScanTerms``, Mamba-2's (C, B, x) are (q, k, v), and its dt, one number of each value head,
replaces (b, a):

1. the convolution has a bias
2. none
3. S ← exp(−exp(A_log) · s) · S with the step s = softplus(dt + dt_bias) within limits
4. S ← S + k ⊗ (s · v)
5. y = Sᵀ q + skip · v
6. u = y · silu(z), out = norm · u / √(mean(u²) + eps), the mean over all heads of a key head

By Kimi's rule each channel of a key has a decay of its own, so that a has key_dim numbers of a
head, as dt_bias has, and step 6 has sigmoid(z).

With ``LightningTerms`` a token has neither b nor a:

1. none
2. q and k, each head's normed as in step 6 and rotated by the token's position, q / √key_dim
3. S ← exp(−exp(A_log)) · S
4. S ← S + k ⊗ v
5. y = Sᵀ q
6. out = norm · y / √(mean(y²) + eps) · sigmoid(z), the mean over a group of heads

A state has the last inputs of the convolution and the matrices of all heads. The rows of a step
advance theirs (``StateRows``). Drafts leave no trace in it, since they may be refused: their inputs
are kept, and the next step first advances the state over the accepted ones. A token that the state
has seen is computed once more with decay 1 and without step 4.

``reference.py`` computes it row by row; ``plain.py`` serves rows of the host, Triton those of a
device. Native code (``kernels/cpu/delta.h``) and Triton's kernels sum in an order that does not
depend on the other rows or on the chunks of a prompt.
"""

from torch import Tensor

from kernels.delta import device, plain
from kernels.delta.device import DeviceRows
from kernels.delta.states import (
    DeltaWeights,
    LayerStates,
    LightningTerms,
    ScanTerms,
    StateRows,
)
from kernels.dispatch import runs_triton

__all__ = [
    "DeltaWeights",
    "DeviceRows",
    "LayerStates",
    "LightningTerms",
    "ScanTerms",
    "StateRows",
    "gated_delta",
]


def gated_delta(
    x: Tensor,
    gates: Tensor | None,
    weights: DeltaWeights,
    layer: LayerStates,
    rows: StateRows | DeviceRows,
) -> Tensor:
    """x [T, channels + num_value_heads · value_dim], the (q, k, v, z) of the tokens; gates
    [T, 2 · num_value_heads], their (b, a), with more of a by channel, or dt [T, num_value_heads],
    or none of lightning attention → [T, num_value_heads · value_dim], 0 for padding.

    Each row advances its state over its kept drafts and its tokens, without its drafts, whose
    inputs are kept. If the state passes multiples of ``interval`` on the way, it is copied at the
    last one of them.
    """
    gates = x[:, :0] if gates is None else gates
    if isinstance(rows, StateRows):
        return plain.gated_delta(x, gates, weights, layer, rows)
    if runs_triton(x):
        from kernels.delta.triton import launch

        return launch(x, gates, weights, layer, rows)
    return device.gated_delta(x, gates, weights, layer, rows)
