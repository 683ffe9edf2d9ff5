"""The gated feed-forward network."""

from services.worker.layers.gated import GatedProducts
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X


class GatedMLP(GatedProducts):
    """SwiGLU (arXiv 2002.05202)."""

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
