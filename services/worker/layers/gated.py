"""The two GEMMs of a feed-forward network, mostly a gated one (arXiv 2002.05202)."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Rows, Shard


class GatedNames(NamedTuple):
    """A checkpoint's names of the layers that form the GEMMs."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def firsts(self, inner: int | Shard) -> Mapping[str, int | Shard | Rows]:
        """The layers of the first GEMM, and their rows."""
        return {self.gate: inner, self.up: inner}


class UngatedNames(GatedNames):
    """Of a network without gates."""

    def firsts(self, inner: int | Shard) -> Mapping[str, int | Shard | Rows]:
        return {self.up: inner}


USUAL_NAMES, UNGATED_NAMES = GatedNames(), UngatedNames()


class GatedProducts(nn.Module):
    """down(act(gate) · up) or down(act(up)), or a rank's shard of its ``inner`` size."""

    def __init__(
        self,
        hidden_size: int,
        inner: int | Shard,
        has_bias: bool = False,
        names: GatedNames = USUAL_NAMES,
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, names.firsts(inner), has_bias)
        self.down_proj = Linear(inner, {names.down: hidden_size}, has_bias)
