"""The two GEMMs of a gated feed-forward network (arXiv 2002.05202)."""

from typing import NamedTuple

from torch import nn

from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Shard


class GatedNames(NamedTuple):
    """A checkpoint's names of the layers that form the GEMMs."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


USUAL_NAMES = GatedNames()


class GatedProducts(nn.Module):
    """down(act(gate) · up), or a rank's shard of its ``inner`` size."""

    def __init__(
        self,
        hidden_size: int,
        inner: int | Shard,
        has_bias: bool = False,
        names: GatedNames = USUAL_NAMES,
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, {names.gate: inner, names.up: inner}, has_bias)
        self.down_proj = Linear(inner, {names.down: hidden_size}, has_bias)
