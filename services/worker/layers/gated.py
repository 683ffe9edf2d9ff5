"""The two products of a gated feed-forward network (arXiv 2002.05202)."""

from typing import NamedTuple

from torch import nn

from services.worker.layers.linear import Linear
from services.worker.layers.parallel import Parallel


class GatedNames(NamedTuple):
    """What a checkpoint calls the layers that the products are made of."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


USUAL_NAMES = GatedNames()


class GatedProducts(nn.Module):
    """down(silu(gate) · up), whose inner ``size`` ranks share."""

    def __init__(
        self,
        hidden_size: int,
        size: int,
        parallel: Parallel,
        has_bias: bool = False,
        names: GatedNames = USUAL_NAMES,
    ) -> None:
        super().__init__()
        shard = parallel.inner(size)
        self.gate_up_proj = Linear(hidden_size, {names.gate: shard, names.up: shard}, has_bias)
        self.down_proj = Linear(shard, {names.down: hidden_size}, has_bias)
