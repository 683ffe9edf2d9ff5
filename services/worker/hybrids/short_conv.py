"""A gated short convolution (LFM2, arXiv 2511.23404), whose last columns are in the KV cache."""

import math

import torch

from kernels.kv_layout import KVLayout
from services.worker.layers.delta_rule import Columns
from services.worker.layers.kept import Cached
from services.worker.layers.linear import Linear, WeightPiece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel
from services.worker.layers.weights import empty_parameter
from services.worker.machine.kv_groups import KVSpec
from shared.errors import ConfigError


class ShortConv(Cached):
    """From the GEMM of gates and inputs to the output GEMM. A token's column takes as many entries
    of a block as it needs: ``entry`` is the shape of one. Ranks share the channels."""

    def __init__(
        self,
        hidden_size: int,
        width: int,
        entry: tuple[int, ...],
        layer: int,
        parallel: Parallel,
        *,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        channels = parallel.inner(hidden_size)
        names = ("in_proj_b", "in_proj_c", "in_proj_x")
        self.in_proj = Linear(hidden_size, dict.fromkeys(names, channels), has_bias)
        self.out_proj = Linear(channels, hidden_size, has_bias)
        self.weight = empty_parameter(channels.num, width)
        self.bias = empty_parameter(channels.num) if has_bias else None
        self.number = layer
        self._channels = channels
        self._entry = entry
        part = math.prod(entry)
        num_parts = -(-channels.num // part)
        self.columns = Columns(layer, num_parts, part, self.weight, self.bias)

    @property
    def group(self) -> int:
        return self.columns.group

    def put_cache(self, place: int, group: int) -> None:
        self.columns = self.columns._replace(layer=place, group=group)

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec(self._entry, self.weight.shape[1], self.columns.num_parts)

    def kv_layout(self, dtype: torch.dtype, codes: torch.dtype | None) -> KVLayout:
        if codes is not None:
            raise ConfigError(
                "kv-cache-dtype: int8 and fp8 are for keys, values and latents; this model keeps"
                " convolutions: use auto"
            )
        return super().kv_layout(dtype, codes)

    @property
    def numbers_per_token(self) -> int:
        """The gates, the inputs, and all columns that an output is made of."""
        return (5 + self.weight.shape[1]) * self._channels.num

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        start, total = self._channels.start, self._channels.total
        pieces = {f"{name}.conv.weight": WeightPiece(self.weight, 0, start, total)}
        if self.bias is not None:
            pieces[f"{name}.conv.bias"] = WeightPiece(self.bias, 0, start, total)
        return pieces

    def forward(
        self, ops: Ops[X], x: X, *, norm: RMSNorm | None = None, residual: X | None = None
    ) -> X:
        """convolution(norm(x)) + residual: [T, hidden] → [T, hidden]"""
        convolved = ops.short_conv(ops.linear(x, self.in_proj, norm=norm), self.columns)
        return ops.linear(convolved, self.out_proj, residual=residual)
