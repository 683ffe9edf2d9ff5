"""Adapters in native code: instructions next to the products of the trunk."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from kernels.adapt import Change
from kernels.adapt.layout import Layout
from kernels.cpu.adapt import AdaptedRows, PackedAdapt
from kernels.cpu.adapter import PackedAdapter
from kernels.cpu.operators import Kind
from services.worker.adapters.sites import Site
from services.worker.backends.recorder import Recorder, Register, Value
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts
from services.worker.layers.linear import Linear


class NativeForm:
    """Adapters as tiles, read where ``rows`` point to, those of a pass's tokens, and ``head_rows``,
    those of the rows of logits."""

    def __init__(self, max_adapters: int) -> None:
        self.rows, self.head_rows = AdaptedRows(max_adapters), AdaptedRows(max_adapters)

    def operators(self, sites: Sequence[Site]) -> dict[nn.Module, PackedAdapt]:
        """Those of the sites' modules."""
        return {site.module: self._operator(number, site) for number, site in enumerate(sites)}

    def _operator(self, number: int, site: Site) -> PackedAdapt:
        rows = self.head_rows if isinstance(site.module, LMHead) else self.rows
        size = max((part.outputs.num for part in site.parts.values()), default=0)
        if isinstance(site.module, Linear | LMHead):
            size = site.module.outputs
        return PackedAdapt(rows, number, size)

    def pack(self, changes: Sequence[Sequence[Change]]) -> PackedAdapter:
        return PackedAdapter(changes)

    def bind(self, index: int, adapter: PackedAdapter | None) -> None:
        self.rows.bind(index, adapter)
        self.head_rows.bind(index, adapter)

    def lay_out(self, layout: Layout | None) -> None:
        """Also for logits of all tokens, which native code computes in its own steps."""
        self.rows.lay_out(layout)
        self.head_rows.lay_out(layout)

    def lay_out_logits(self, layout: Layout | None) -> None:
        self.head_rows.lay_out(layout)


class AdaptingRecorder(Recorder):
    """Adds the ``operators`` of some modules. Operands of products are in the order of the inputs,
    and not yet rounded to 8 bits."""

    def __init__(
        self,
        operators: Mapping[nn.Module, PackedAdapt],
        names: dict[nn.Module, str],
        inputs: list[Register],
        num_kept: int,
    ) -> None:
        super().__init__(names, inputs, num_kept)
        self._operators = operators
        self._unordered: dict[int, int] = {}  # by the register of an ordered operand

    def embed(self, ids: Value, embedding: Embedding) -> Value:
        out = super().embed(ids, embedding)
        if embedding in self._operators:
            adapt = self._operators[embedding]
            self._add(Kind.ADAPT_EMBEDDINGS, ids, out, embedding.inputs, adapt=adapt)
        return out

    def experts(self, x: Value, experts: Experts, **options: Any) -> Value:
        first = len(self.instructions)
        out = super().experts(x, experts, **options)
        for number, each in enumerate(self.instructions[first:], first):
            if each.kind == Kind.EXPERTS and experts.gate in self._operators:
                adapt = self._operators[experts.gate]
                self.instructions[number] = replace(each, adapt=adapt)
        return out

    def _ordered(self, x: Value, weight: Linear | LMHead) -> Value:
        ordered = super()._ordered(x, weight)
        self._unordered[ordered.register] = x.register
        return ordered

    def _product(self, x: Value, out: Value, weight: Linear | LMHead, **options: Any) -> None:
        super()._product(x, out, weight, **options)
        if weight in self._operators:
            self._adapt(x, out, weight, adds=True, scale=options.get("scale", 1.0))

    def _gated(self, x: Value, out: Value, gate_up: Linear, **options: Any) -> None:
        if gate_up in self._operators:
            deltas = self.new(gate_up.outputs, is_wide=True)
            self._adapt(x, deltas, gate_up)
            options |= {"second": deltas.register, "adapt": self._operators[gate_up]}
        super()._gated(x, out, gate_up, **options)

    def _adapt(self, x: Value, out: Value, weight: Linear | LMHead, **options: Any) -> None:
        given = Value(self._unordered[x.register], 0)
        self._add(Kind.ADAPT, given, out, weight.inputs, adapt=self._operators[weight], **options)
