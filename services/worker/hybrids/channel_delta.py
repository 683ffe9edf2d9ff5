"""A layer with a state: Kimi Delta Attention (arXiv 2510.26692), the delta rule with a decay of
each channel of a key."""

from services.worker.hybrids.delta_rows import DeltaSpec
from services.worker.hybrids.ruled import Ruled
from services.worker.layers.linear import Linear, WeightPiece, row_piece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel, as_shard

HEAD_NAMES = "linear_attn_config.num_heads", "linear_attn_config.num_heads"
PARTS = "q", "k", "v"


class ChannelDelta(Ruled):
    """Each head of ``spec`` has its own key, of the values' size. Decays, and the gates of outputs,
    are made through numbers of that size."""

    def __init__(
        self, hidden_size: int, spec: DeltaSpec, layer: int, eps: float, parallel: Parallel
    ) -> None:
        size = spec.key_dim
        heads, _ = parallel.heads(spec.num_heads, spec.num_heads, HEAD_NAMES)
        inner = heads.times(size)
        super().__init__(layer, heads, as_shard(3 * inner.num), spec.width, as_shard(size), inner)
        self.in_proj = Linear(hidden_size, {f"{part}_proj": inner for part in PARTS})
        self.gates = Linear(hidden_size, {"b_proj": heads})
        self.f_a_proj, self.f_b_proj = Linear(hidden_size, size), Linear(size, inner)
        self.g_a_proj, self.g_b_proj = Linear(hidden_size, size), Linear(size, inner)
        self.out_proj = Linear(inner, {"o_proj": hidden_size})
        self._make_rule(heads.num, eps)

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        start, num, total = self._heads
        by_head = self.decay.view(1, 1, num, 1)
        convolutions = zip(PARTS, self.conv[:, None].chunk(len(PARTS)), strict=True)
        return {
            **{
                f"{name}.{part}_conv1d.weight": row_piece(own, self._biases)
                for part, own in convolutions
            },
            f"{name}.A_log": WeightPiece(by_head, 2, start, total),
            f"{name}.dt_bias": row_piece(self.dt_bias, self._biases),
            f"{name}.o_norm.weight": row_piece(self.norm, self._normed),
        }

    @property
    def numbers_per_token(self) -> int:
        """The decays and the gates of outputs exist until the end, too."""
        return super().numbers_per_token + 2 * self.out_proj.inputs

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
        decays = ops.linear(ops.linear(x, self.f_a_proj, norm=norm), self.f_b_proj)
        openings = ops.linear(ops.linear(x, self.g_a_proj, norm=norm), self.g_b_proj)
        given = ops.join(ops.linear(x, self.in_proj, norm=norm), openings)
        gates = ops.join(ops.linear(x, self.gates, norm=norm), decays)
        ruled = ops.gated_delta(given, gates, self.rule)
        return ops.linear(ruled, self.out_proj, residual=residual, scale=scale)
