"""Layers with a state, which advances by a rule of ``kernels.delta``."""

import torch

from kernels.delta import ScanTerms
from services.worker.layers.delta_rule import DeltaRule
from services.worker.layers.kept import Stateful
from services.worker.layers.linear import Linear, WeightPiece, row_piece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Rows, Shard
from services.worker.layers.weights import empty_parameter
from services.worker.machine.state_pool import StateSpec


class Advancing(Stateful):
    """From the GEMM of inputs to the output GEMM. Its state advances by the ``rule``."""

    in_proj: Linear
    out_proj: Linear
    rule: DeltaRule

    def _set_rule(self, rule: DeltaRule) -> None:
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
        """The inputs and gates, also as drafts are kept, and the sums of the convolution, or the
        heads' outputs before and after the norm."""
        channels, gates, inner = self.rule.channels, self.rule.num_gates, self.out_proj.inputs
        return 5 * channels + 4 * gates + inner + max(3 * channels, 5 * inner)


class Ruled(Advancing):
    """With the GEMM of gates. Ranks share the ``heads``. ``biases`` of steps are by default one of
    each head. ``layer`` is its number in the model. The convolution has the model's dtype; decays,
    biases of steps and the norm are float32."""

    gates: Linear

    def __init__(
        self,
        layer: int,
        heads: Shard,
        channels: Shard | Rows,
        width: int,
        normed: Shard,
        biases: Shard | None = None,
    ) -> None:
        super().__init__()
        self.number = layer
        self._heads, self._channels, self._normed = heads, channels, normed
        self._biases = heads if biases is None else biases
        self.conv = empty_parameter(channels.num, width)
        self.decay = empty_parameter(heads.num, dtype=torch.float32)
        self.dt_bias = empty_parameter(self._biases.num, dtype=torch.float32)
        self.norm = empty_parameter(normed.num, dtype=torch.float32)

    def _make_rule(self, num_key_heads: int, eps: float, scan: ScanTerms | None = None) -> None:
        own = self.conv, self.decay, self.dt_bias, self.norm
        self._set_rule(DeltaRule(0, num_key_heads, *own, eps, scan))

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        return {
            f"{name}.conv1d.weight": row_piece(self.conv[:, None], self._channels),
            f"{name}.A_log": row_piece(self.decay, self._heads),
            f"{name}.dt_bias": row_piece(self.dt_bias, self._biases),
            f"{name}.norm.weight": row_piece(self.norm, self._normed),
        }

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
