"""Adapters in native code: instructions next to the products of the trunk."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from kernels.adapt import Change
from kernels.adapt.layout import Layout
from kernels.cpu.adapt import AdaptedRows, PackedAdapt
from kernels.cpu.adapter import PackedAdapter
from kernels.cpu.operators import Kind
from services.worker.adapters.sites import Site
from services.worker.backends.recorder import Recorder, Register, Value
from services.worker.layers.embedding import LMHead
from services.worker.layers.linear import Linear


class NativeForm:
    """Adapters as tiles, read where ``rows`` point to."""

    def __init__(self, max_adapters: int) -> None:
        self.rows = AdaptedRows(max_adapters)

    def operators(self, sites: Sequence[Site]) -> dict[nn.Module, PackedAdapt]:
        """Those of the sites' products."""
        return {
            linear: PackedAdapt(self.rows, number, linear.outputs)
            for number, (linear, _) in enumerate(sites)
        }

    def pack(self, changes: Sequence[Sequence[Change]]) -> PackedAdapter:
        return PackedAdapter(changes)

    def bind(self, index: int, adapter: PackedAdapter | None) -> None:
        self.rows.bind(index, adapter)

    def lay_out(self, layout: Layout | None) -> None:
        self.rows.lay_out(layout)


class AdaptingRecorder(Recorder):
    """Adds the ``operators`` of some products. Their operands are in the order of the inputs, and
    not yet rounded to 8 bits."""

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
