"""A layer with a state: lightning attention (arXiv 2401.04658), with a constant decay of a head."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.delta import LightningTerms
from services.worker.hybrids.delta_rows import joined_rows
from services.worker.hybrids.ruled import Advancing
from services.worker.layers.delta_rule import DeltaRule
from services.worker.layers.linear import Linear, WeightPiece, row_piece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel, cannot_split
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import empty_parameter


class LightningSpec(NamedTuple):
    """The heads on all ranks, the groups of heads that are normed together, and the layers of the
    model."""

    num_heads: int
    head_dim: int
    num_groups: int
    num_layers: int


def slopes(num_heads: int) -> list[float]:
    """As in ALiBi (arXiv 2108.12409): a geometric sequence if the number is a power of 2, else the
    next lower one's and every second of the next higher one's."""
    power = 1 << (num_heads.bit_length() - 1)
    found = [2.0 ** (-8 * head / power) for head in range(1, power + 1)]
    if power < num_heads:
        found += slopes(2 * power)[::2][: num_heads - power]
    return found


def log_rates(spec: LightningSpec, layer: int) -> list[float]:
    """The logarithms of the decays' rates, as in the published code, which scales the slopes by the
    number of the layer before. Other servers scale them by the layer's own."""
    scale = 1 - (layer - 1) / (spec.num_layers - 1) + 1e-5
    return [math.log(scale * slope) for slope in slopes(spec.num_heads)]


class Lightning(Advancing):
    """Queries and keys are normed head by head and rotated as ``rotary`` has it. A rank has whole
    groups. ``layer`` is its number in the model."""

    decay: Tensor
    conv: Tensor
    dt_bias: Tensor

    def __init__(
        self,
        hidden_size: int,
        spec: LightningSpec,
        layer: int,
        rotary: RotaryEmbedding,
        eps: float,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        if (num := spec.num_groups) % parallel.size:
            raise cannot_split(f"group_norm_size {num}", parallel.size, lambda n: num % n == 0)
        heads, _ = parallel.heads(spec.num_heads, spec.num_heads)
        self._inner = inner = heads.times(spec.head_dim)
        self.number = layer
        rows = joined_rows(inner, inner, inner)
        self.in_proj = Linear(hidden_size, {"query_key_value": rows, "g_proj": inner})
        self.out_proj = Linear(inner, {"dense": hidden_size})
        self.norm = empty_parameter(inner.num, dtype=torch.float32)
        self.head_norms = empty_parameter(2 * spec.head_dim, dtype=torch.float32)
        own = log_rates(spec, layer)[heads.start : heads.start + heads.num]
        numbers = {"decay": own, "conv": [[1.0]] * (3 * inner.num), "dt_bias": []}
        for name, each in numbers.items():
            tensor = torch.tensor(each, dtype=torch.float32)
            self.register_buffer(name, tensor, persistent=False)
        norms = self.head_norms.view(2, spec.head_dim)
        terms = LightningTerms(norms, rotary.table, spec.num_groups // parallel.size)
        own_weights = self.conv, self.decay, self.dt_bias, self.norm
        self._set_rule(DeltaRule(0, heads.num, *own_weights, eps, terms))

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        query, key = self.head_norms.chunk(2)
        return {
            f"{name}.query_layernorm.weight": WeightPiece(query),
            f"{name}.key_layernorm.weight": WeightPiece(key),
            f"{name}.g_norm.weight": row_piece(self.norm, self._inner),
        }

    def forward(
        self, ops: Ops[X], x: X, *, norm: RMSNorm | None = None, residual: X | None = None
    ) -> X:
        """attention(norm(x)) + residual: [T, hidden] → [T, hidden]"""
        ruled = ops.gated_delta(ops.linear(x, self.in_proj, norm=norm), None, self.rule)
        return ops.linear(ruled, self.out_proj, residual=residual)
