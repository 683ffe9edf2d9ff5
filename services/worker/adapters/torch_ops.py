"""Adapters by torch's operators: deltas next to the products of the trunk."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.adapt import Adapted, Change, add_deltas
from kernels.adapt.layout import Layout
from kernels.rms_norm import rms_norm
from services.worker.adapters.sites import Site
from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm

Changes = dict[Linear, Sequence[Change]]


class TorchForm:
    """Adapters as they are. ``adapted`` are the tokens of the next pass with one adapter each."""

    def __init__(self, sites: Sequence[Site], max_adapters: int) -> None:
        self._linears = [site.linear for site in sites]
        self._bound: list[Changes] = [{}] * max_adapters
        self.adapted: list[tuple[Tensor, Changes]] = []

    def pack(self, changes: Sequence[Sequence[Change]]) -> Changes:
        return {linear: own for linear, own in zip(self._linears, changes, strict=True) if own}

    def bind(self, index: int, adapter: Changes | None) -> None:
        self._bound[index] = adapter or {}

    def lay_out(self, layout: Layout | None) -> None:
        segments = [] if layout is None else layout.segments()
        self.adapted = [(torch.from_numpy(own), self._bound[index]) for index, own in segments]


class AdaptingOps(TorchOps):
    """Rows without adapters are computed as without this class, bit for bit."""

    def __init__(self, form: TorchForm, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._form = form

    def linear(
        self,
        x: Tensor,
        linear: Linear,
        *,
        norm: RMSNorm | None = None,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        adapted = [] if linear.is_partial else self._adapted(x, linear, norm)
        y = super().linear(x, linear, norm=norm, residual=residual, scale=scale)
        add_deltas(y, adapted, scale)
        return y

    def gated(
        self, x: Tensor, gate_up: Linear, *, norm: RMSNorm | None = None, **options: Any
    ) -> Tensor:
        add = partial(add_deltas, adapted=self._adapted(x, gate_up, norm))
        return super().gated(x, gate_up, norm=norm, add=add, **options)

    def _part(self, x: Tensor, linear: Linear, norm: RMSNorm | None) -> Tensor:
        part = super()._part(x, linear, norm)
        add_deltas(part, self._adapted(x, linear, norm))
        return part

    def _adapted(self, x: Tensor, linear: Linear, norm: RMSNorm | None) -> list[Adapted]:
        """Copies of the rows, since a product may change its input."""
        found = []
        for tokens, changes in self._form.adapted:
            if linear in changes:
                rows = x.index_select(0, tokens)
                rows = rows if norm is None else rms_norm(rows, norm.weight, norm.eps)
                found.append(Adapted(tokens, rows, changes[linear]))
        return found
