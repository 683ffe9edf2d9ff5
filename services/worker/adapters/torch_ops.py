"""Adapters by torch's operators: deltas next to the products of a model."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kernels.adapt import Adapted, Change, add_deltas
from kernels.adapt.layout import Layout
from kernels.experts import Additions
from kernels.rms_norm import rms_norm
from services.worker.adapters.sites import Site
from services.worker.backends.torch_lm import Add, TorchOps
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts
from services.worker.layers.gated import GatedProducts
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm

Changes = dict[nn.Module, Sequence[Change]]


class TorchForm:
    """Adapters as they are. ``adapted`` are the tokens of the next pass with one adapter each, and
    ``adapted_logits`` the rows of the next logits."""

    def __init__(self, sites: Sequence[Site], max_adapters: int) -> None:
        self._modules = [site.module for site in sites]
        self._bound: list[Changes] = [{}] * max_adapters
        self.adapted: list[tuple[Tensor, Changes]] = []
        self.adapted_logits: list[tuple[Tensor, Changes]] = []

    def pack(self, changes: Sequence[Sequence[Change]]) -> Changes:
        return {module: own for module, own in zip(self._modules, changes, strict=True) if own}

    def bind(self, index: int, adapter: Changes | None) -> None:
        self._bound[index] = adapter or {}

    def lay_out(self, layout: Layout | None) -> None:
        self.adapted = self._segments(layout)

    def lay_out_logits(self, layout: Layout | None) -> None:
        self.adapted_logits = self._segments(layout)

    def _segments(self, layout: Layout | None) -> list[tuple[Tensor, Changes]]:
        segments = [] if layout is None else layout.segments()
        return [(torch.from_numpy(own), self._bound[index]) for index, own in segments]


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

    def embed(self, ids: Tensor, embedding: Embedding) -> Tensor:
        rows = super().embed(ids, embedding)
        add_deltas(rows, _adapted(self._form.adapted, ids, embedding))
        return rows

    def adder(self, x: Tensor, of: nn.Module, norm: RMSNorm | None = None) -> Add:
        is_head = isinstance(of, LMHead)
        places = self._form.adapted_logits if is_head else self._form.adapted
        return partial(add_deltas, adapted=_adapted(places, x, of, norm))

    def additions(self, experts: Experts) -> Additions | None:
        if not self._form.adapted:
            return None
        num_chosen = experts.gate.routing.num_chosen
        return _ExpertDeltas(self._form.adapted, experts.products, num_chosen)

    def _adapted(self, x: Tensor, module: nn.Module, norm: RMSNorm | None = None) -> list[Adapted]:
        return _adapted(self._form.adapted, x, module, norm)


class _ExpertDeltas:
    """Changes the products of each expert's pairs of a token and a choice."""

    def __init__(
        self,
        adapted: Sequence[tuple[Tensor, Changes]],
        products: Sequence[GatedProducts],
        num_chosen: int,
    ) -> None:
        self._adapted = adapted
        self._products = products
        self._num_chosen = num_chosen

    def to_gates(self, expert: int, pairs: Tensor, x: Tensor, y: Tensor) -> None:
        self._add(self._products[expert].gate_up_proj, pairs, x, y)

    def to_downs(self, expert: int, pairs: Tensor, x: Tensor, y: Tensor) -> None:
        self._add(self._products[expert].down_proj, pairs, x, y)

    def _add(self, linear: Linear, pairs: Tensor, x: Tensor, y: Tensor) -> None:
        tokens = pairs // self._num_chosen
        places = [
            (torch.isin(tokens, own).nonzero().flatten(), changes)
            for own, changes in self._adapted
            if linear in changes
        ]
        add_deltas(y, _adapted(places, x, linear))


def _adapted(
    places: Sequence[tuple[Tensor, Changes]],
    x: Tensor,
    module: nn.Module,
    norm: RMSNorm | None = None,
) -> list[Adapted]:
    """Copies of the rows, since a product may change its input."""
    found = []
    for tokens, changes in places:
        if module in changes and len(tokens):
            rows = x.index_select(0, tokens)
            rows = rows if norm is None else rms_norm(rows, norm.weight, norm.eps)
            found.append(Adapted(tokens, rows, changes[module]))
    return found
