"""The feed-forward network of a layer: one for all tokens, or a mixture of experts."""

from collections.abc import Iterable

from kernels.silu_mul import Act, Clamp
from services.worker.layers.experts import Experts, Router
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


class Mixture(Experts):
    """The experts that a token's router chooses, and perhaps a network that all tokens share. If
    there are experts of ``images``, these are for other tokens."""

    def __init__(
        self,
        gate: Router,
        experts: Iterable[GatedProducts],
        shared: GatedMLP | None = None,
        act: Act | Clamp = "silu",
        images: Experts | None = None,
    ) -> None:
        super().__init__(gate, experts, act)
        self.shared_experts, self.images = shared, images
        if images is not None:
            self.of_images, images.of_images = False, True

    def forward(self, ops: Ops[X], x: X, *, norm: RMSNorm, residual: X, scale: float = 1.0) -> X:
        """scale · (experts(norm(x)) + shared(norm(x))) + residual: [T, hidden] → [T, hidden]"""
        normed = ops.norm(x, norm)
        x = ops.experts(normed, self, residual=residual, scale=scale)
        if self.images is not None:
            x = ops.experts(normed, self.images, residual=x, scale=scale)
        if self.shared_experts is None:
            return x
        return self.shared_experts.forward(ops, normed, residual=x, scale=scale)
