"""The feed-forward network."""

from kernels.silu_mul import Act
from services.worker.layers.gated import USUAL_NAMES, GatedNames, GatedProducts
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel


class GatedMLP(GatedProducts):
    """SwiGLU or GEGLU (arXiv 2002.05202), or with relu2 and ``UngatedNames`` one without gates."""

    def __init__(
        self,
        hidden_size: int,
        size: int,
        parallel: Parallel,
        has_bias: bool = False,
        act: Act = "silu",
        names: GatedNames = USUAL_NAMES,
    ) -> None:
        super().__init__(hidden_size, parallel.inner(size), has_bias, names)
        self._act = act

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
        inner = ops.gated(x, self.gate_up_proj, norm=norm, act=self._act)
        return ops.linear(inner, self.down_proj, residual=residual, scale=scale)
