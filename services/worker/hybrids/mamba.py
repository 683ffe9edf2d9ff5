"""A layer with a state: Mamba-2 (arXiv 2405.21060)."""

from typing import NamedTuple

import numpy as np
import torch

from kernels.delta import ScanTerms
from services.worker.hybrids.delta_rows import DeltaSpec, rows_of
from services.worker.hybrids.ruled import Ruled
from services.worker.layers.delta_rule import DeltaRule
from services.worker.layers.linear import Linear, WeightPiece, row_piece
from services.worker.layers.parallel import Parallel, Rows, Shard, cannot_split
from services.worker.layers.weights import empty_parameter

Limits = tuple[float, float]


class MambaOptions(NamedTuple):
    """The biases of the convolution and of both GEMMs, and the limits of a token's step."""

    has_conv_bias: bool = True
    has_bias: bool = False
    limits: Limits = (0.0, float("inf"))


class Mamba(Ruled):
    """``spec`` counts the heads of all ranks; the groups that share B and C are its key heads. A
    rank has whole groups. The convolution has the model's dtype; decays, biases of steps, skips and
    the norm are float32."""

    def __init__(
        self,
        hidden_size: int,
        spec: DeltaSpec,
        layer: int,
        eps: float,
        parallel: Parallel,
        *,
        options: MambaOptions,
    ) -> None:
        super().__init__()
        if (num := spec.num_key_heads) % parallel.size:
            raise cannot_split(f"mamba_n_groups {num}", parallel.size, lambda n: num % n == 0)
        names = "mamba_n_heads", "mamba_n_groups"
        heads, groups = parallel.heads(spec.num_heads, num, names)
        self._heads, self._inner = heads, heads.times(spec.value_dim)
        self._channels, inputs, steps = _rows(spec, heads, groups)
        self.in_proj = Linear(hidden_size, {"in_proj": inputs}, options.has_bias)
        self.gates = Linear(hidden_size, {"in_proj": steps}, options.has_bias)
        self.out_proj = Linear(self._inner, hidden_size, options.has_bias)
        self.conv = empty_parameter(self._channels.num, spec.width)
        self.conv_bias = empty_parameter(self._channels.num) if options.has_conv_bias else None
        self.decay, self.dt_bias, self.skip = (
            empty_parameter(heads.num, dtype=torch.float32) for _ in range(3)
        )
        self.norm = empty_parameter(self._inner.num, dtype=torch.float32)
        self.number = layer
        rule = DeltaRule(
            layer=0,
            num_key_heads=groups.num,
            conv=self.conv,
            decay=self.decay,
            dt_bias=self.dt_bias,
            norm=self.norm,
            eps=eps,
            scan=ScanTerms(self.skip, self.conv_bias, options.limits),
        )
        self._follow(rule)

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        pieces = {
            f"{name}.conv1d.weight": row_piece(self.conv[:, None], self._channels),
            f"{name}.A_log": row_piece(self.decay, self._heads),
            f"{name}.dt_bias": row_piece(self.dt_bias, self._heads),
            f"{name}.D": row_piece(self.skip, self._heads),
            f"{name}.norm.weight": row_piece(self.norm, self._inner),
        }
        if self.conv_bias is not None:
            pieces[f"{name}.conv1d.bias"] = row_piece(self.conv_bias, self._channels)
        return pieces


def _rows(spec: DeltaSpec, heads: Shard, groups: Shard) -> tuple[Rows, Rows, Rows]:
    """The rows (C, B, x) of ``heads`` in the convolution's tensor (x, B, C), and in the tensor of
    inputs (z, x, B, C, dt) their rows (C, B, x, z), and of dt."""
    inner, of_keys = spec.num_heads * spec.value_dim, spec.num_key_heads * spec.key_dim
    num_channels = inner + 2 * of_keys
    total = inner + num_channels + spec.num_heads
    ends = np.cumsum([inner, inner, of_keys, of_keys])
    z, x, b, c, dt = np.split(np.arange(total), ends)
    own = np.concatenate([rows_of(c, groups), rows_of(b, groups), rows_of(x, heads)])
    inputs = np.concatenate([own, rows_of(z, heads)])
    return Rows(own - inner, num_channels), Rows(inputs, total), Rows(rows_of(dt, heads), total)
