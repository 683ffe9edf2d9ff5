"""Layers with a state, which advances by a rule of ``kernels.delta``."""

from services.worker.layers.delta_rule import DeltaRule
from services.worker.layers.kept import Stateful
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.machine.state_pool import StateSpec


class Ruled(Stateful):
    """From the GEMMs of inputs and gates to the output GEMM. Ranks share the heads."""

    in_proj: Linear
    gates: Linear
    out_proj: Linear
    rule: DeltaRule

    def _follow(self, rule: DeltaRule) -> None:
        self.rule = rule
        self.state_spec = StateSpec(
            num_heads=rule.num_heads,
            key_dim=rule.key_dim,
            value_dim=rule.value_dim,
            width=rule.conv.shape[1],
            channels=rule.channels,
            num_gates=rule.num_gates,
        )

    def put_state(self, place: int) -> None:
        self.rule = self.rule._replace(layer=place)

    @property
    def numbers_per_token(self) -> int:
        """The inputs and gates, also in float32, and the heads' outputs before and after the
        norm."""
        inputs, gates = self.in_proj.outputs, self.gates.outputs
        return 3 * (inputs + gates) + 5 * self.out_proj.inputs

    def forward(
        self,
        ops: Ops[X],
        x: X,
        *,
        norm: RMSNorm | None = None,
        residual: X | None = None,
        scale: float = 1.0,
    ) -> X:
        """scale · rule(norm(x)) + residual: [T, hidden] → [T, hidden]"""
        given, gates = ops.linear(x, self.in_proj, norm=norm), ops.linear(x, self.gates, norm=norm)
        ruled = ops.gated_delta(given, gates, self.rule)
        return ops.linear(ruled, self.out_proj, residual=residual, scale=scale)
