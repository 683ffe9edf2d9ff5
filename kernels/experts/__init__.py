"""The chosen experts of each token: feed-forward networks and the weighted sum of their
outputs.

Decoding is bound by reading the weights of the used experts, each once. Quantized weights are
dequantized inside the GEMM for any number of tokens.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.codes import Codes
from kernels.dispatch import runs_triton
from kernels.experts.biases import Biases
from kernels.silu_mul import Act, Clamp, silu_mul

__all__ = ["Additions", "Biases", "Clamp", "Weights", "experts"]

Weights = Tensor | Codes | Sequence[Tensor | Codes]
BLOCK_ROWS = 8  # of each of torch's GEMMs: another number of rows may round differently


class Additions(Protocol):
    """Adds to products of an expert, in place: y [n, N] of x [n, K], rows of ``pairs`` [n] int64
    of a token and one of its k choices."""

    def to_gates(self, expert: int, pairs: Tensor, x: Tensor, y: Tensor) -> None: ...

    def to_downs(self, expert: int, pairs: Tensor, x: Tensor, y: Tensor) -> None: ...


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
    additions: Additions | None = None,
) -> Tensor:
    """residual + Σ weights[:, i] · down(act(gate(x)) · up(x)) over the experts chosen[:, i]; a
    ``Clamp`` replaces act(gate) · up.

    x [T, H], chosen [T, k] int32 and weights [T, k] float32 of ``route``, gate_up [E, 2 I, H] with
    gates before ups or [E, I, H] without, down [E, H, I], residual [T, H] → [T, H]. Expert weights
    and biases are stacked or, for torch's operators, one per expert; weights may be quantized. With
    ``first`` they are a range of experts from that index on, and only these are summed. A token's
    result has the same bits for every batch. ``additions`` are for torch's operators. Raises
    ValueError for arguments the kernels cannot read.
    """
    if runs_triton(x):
        from kernels.experts.triton import launch

        return launch(x, chosen, weights, gate_up, down, residual, biases, act, first)
    parts = _parts(x, chosen, gate_up, down, biases, act, first or 0, additions)
    weighted = parts.view(*chosen.shape, x.shape[1]) * weights[:, :, None]
    out = torch.zeros_like(weighted[:, 0]) if residual is None else residual.float()
    for part in weighted.unbind(1):
        out = out + part
    return out.to(x.dtype)


def _parts(
    x: Tensor,
    chosen: Tensor,
    gate_up: Weights,
    down: Weights,
    biases: Biases | None,
    act: Act | Clamp,
    first: int,
    additions: Additions | None,
) -> Tensor:
    """[T k, H]: the outputs of chosen experts, computed one used expert after another."""
    num_chosen = chosen.shape[1]
    num_experts = down.shape[0] if isinstance(down, Codes) else len(down)
    parts = x.new_zeros(chosen.numel(), x.shape[1])
    by_expert = (chosen.flatten() - first).sort(stable=True)
    hit, counts = by_expert.values.unique_consecutive(return_counts=True)
    pairs_of = by_expert.indices.split(counts.tolist())
    for expert, pairs in zip(hit.tolist(), pairs_of, strict=True):
        if not 0 <= expert < num_experts:
            continue
        rows = x[pairs // num_chosen]
        both, back = _dense(gate_up, expert, x.dtype), _dense(down, expert, x.dtype)
        both_bias = None if biases is None else biases.gate_up[expert]
        back_bias = None if biases is None or biases.down is None else biases.down[expert]
        gates = _product(rows, both, both_bias)
        if additions is not None:
            additions.to_gates(expert, pairs, rows, gates)
        inner = silu_mul(gates, act)
        out = _product(inner, back, back_bias)
        if additions is not None:
            additions.to_downs(expert, pairs, inner, out)
        parts[pairs] = out
    return parts


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % BLOCK_ROWS))
    blocks = [functional.linear(block, weight, bias) for block in padded.split(BLOCK_ROWS)]
    return torch.cat(blocks)[: len(rows)]


def _dense(each: Weights, expert: int, dtype: torch.dtype) -> Tensor:
    one = each.expert(expert) if isinstance(each, Codes) else each[expert]
    return one.values(dtype) if isinstance(one, Codes) else one
