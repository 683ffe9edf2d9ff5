"""A layer with a state: Mamba-2 (arXiv 2405.21060)."""

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.delta import ScanTerms
from services.worker.hybrids.delta_rows import DeltaSpec, rows_of
from services.worker.hybrids.ruled import Ruled
from services.worker.layers.linear import Linear, WeightPiece, row_piece
from services.worker.layers.parallel import Parallel, Rows, Shard, cannot_split
from services.worker.layers.weights import empty_parameter

Limits = tuple[float, float]
HEAD_NAMES = "mamba_n_heads", "mamba_n_groups"


class MambaOptions(NamedTuple):
    """The biases of the convolution and of both GEMMs, and the limits of a token's step."""

    has_conv_bias: bool = True
    has_bias: bool = False
    limits: Limits = (0.0, float("inf"))


def step_limits(given: tuple[Any, Any] | None) -> Limits:
    """``time_step_limit``: transformers stores infinity as an object, others as it is. Raises
    ValueError."""
    try:
        least, most = map(_number, given or (0.0, "inf"))
    except (KeyError, TypeError, ValueError):
        least, most = 0.0, -1.0
    if not 0 <= least <= most:
        raise ValueError(f"time_step_limit {given} are not two limits")
    return least, most


def _number(limit: Any) -> float:
    return float(limit["__float__"] if isinstance(limit, dict) else limit)


class Mamba(Ruled):
    """``spec`` counts the heads of all ranks; the groups that share B and C are its key heads, and
    a rank has whole groups. ``names`` are the config's of heads and groups."""

    def __init__(
        self,
        hidden_size: int,
        spec: DeltaSpec,
        layer: int,
        eps: float,
        parallel: Parallel,
        *,
        options: MambaOptions,
        names: tuple[str, str] = HEAD_NAMES,
    ) -> None:
        if (num := spec.num_key_heads) % parallel.size:
            raise cannot_split(f"{names[1]} {num}", parallel.size, lambda n: num % n == 0)
        heads, groups = parallel.heads(spec.num_heads, num, names)
        inner = heads.times(spec.value_dim)
        channels, inputs, steps = _rows(spec, heads, groups)
        super().__init__(layer, heads, channels, spec.width, inner)
        self.in_proj = Linear(hidden_size, {"in_proj": inputs}, options.has_bias)
        self.gates = Linear(hidden_size, {"in_proj": steps}, options.has_bias)
        self.out_proj = Linear(inner, hidden_size, options.has_bias)
        self.conv_bias = empty_parameter(channels.num) if options.has_conv_bias else None
        self.skip = empty_parameter(heads.num, dtype=torch.float32)
        self._make_rule(groups.num, eps, ScanTerms(self.skip, self.conv_bias, options.limits))

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        pieces = super().checkpoint_pieces(name)
        pieces[f"{name}.D"] = row_piece(self.skip, self._heads)
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
