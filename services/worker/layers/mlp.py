"""The gated feed-forward network."""

from torch import nn

from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202), whose inner ``size`` ranks share."""

    def __init__(
        self, hidden_size: int, size: int, parallel: Parallel, has_bias: bool = False
    ) -> None:
        super().__init__()
        shard = parallel.inner(size)
        self.gate_up_proj = Linear(hidden_size, {"gate_proj": shard, "up_proj": shard}, has_bias)
        self.down_proj = Linear(shard, hidden_size, has_bias)

    def forward(
        self,
        ops: Ops[X],
        x: X,
        *,
        norm: RMSNorm | None = None,
        residual: X | None = None,
        scale: float = 1.0,
    ) -> X:
        """scale · mlp(norm(x)) + residual: [T, hidden] → [T, hidden]"""
        inner = ops.gated(x, self.gate_up_proj, norm=norm)
        return ops.linear(inner, self.down_proj, residual=residual, scale=scale)
