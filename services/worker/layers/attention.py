"""Attention over the paged KV cache."""

from dataclasses import replace

from torch import nn

from services.worker.layers.heads import AttentionSpec, Heads
from services.worker.layers.linear import Linear, WeightPiece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import empty_parameter
from services.worker.machine.kv_groups import KVSpec


class Attention(nn.Module):
    """Grouped-query self-attention (arXiv 2305.13245), from the GEMM of queries, keys and values to
    the output GEMM. ``spec`` counts the heads of all ranks; each rank has its own heads.

    ``layer`` is its number in the model.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        layer: int,
        rotary: RotaryEmbedding,
        eps: float,
        parallel: Parallel,
        *,
        has_qkv_bias: bool = False,
        has_out_bias: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__()
        heads, kv_heads = parallel.heads(spec.num_heads, spec.num_kv_heads)
        spec = replace(spec, num_heads=heads.num, num_kv_heads=kv_heads.num)
        query, kv = heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        self.qkv_proj = Linear(
            hidden_size, {"q_proj": query, "k_proj": kv, "v_proj": kv}, has_qkv_bias
        )
        self.o_proj = Linear(query, hidden_size, has_out_bias)
        if spec.norm == "none":
            self.q_norm = self.k_norm = None
        else:
            is_each = spec.norm == "heads"
            self.q_norm = RMSNorm(spec.head_dim if is_each else query, eps, norm_offset)
            self.k_norm = RMSNorm(spec.head_dim if is_each else kv, eps, norm_offset)
        self.sinks = empty_parameter(heads.num) if spec.has_sinks else None
        self._shard = heads
        self.number = layer
        self.heads = Heads(
            spec=spec,
            layer=layer,
            query_norm=self.q_norm,
            key_norm=self.k_norm,
            rotary=rotary,
            sinks=self.sinks,
        )

    @property
    def group(self) -> int:
        return self.heads.group

    def put_cache(self, place: int, group: int) -> None:
        """Gives its KV cache a place in the context, and the blocks of a group of layers."""
        self.heads = self.heads._replace(layer=place, group=group)

    @property
    def kv_spec(self) -> KVSpec:
        spec = self.heads.spec
        return KVSpec((2, spec.num_kv_heads, spec.head_dim), spec.window)

    @property
    def numbers_per_token(self) -> int:
        """The numbers of a token's queries, keys and values, and of their rotation."""
        spec = self.heads.spec
        return 5 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim

    @property
    def num_scored_heads(self) -> int:
        """The number of heads with features that torch's fused attention does not support."""
        spec = self.heads.spec
        return spec.num_heads if spec.softcap is not None or spec.has_sinks else 0

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        if self.sinks is None:
            return {}
        return {f"{name}.sinks": WeightPiece(self.sinks, 0, self._shard.start, self._shard.total)}

    def drop_window(self, max_len: int) -> None:
        spec = self.heads.spec
        if spec.window is not None and spec.window >= max_len:
            self.heads = self.heads._replace(spec=replace(spec, window=None))

    def forward(
        self,
        ops: Ops[X],
        x: X,
        *,
        norm: RMSNorm | None = None,
        residual: X | None = None,
        scale: float = 1.0,
    ) -> X:
        """scale · attention(norm(x)) + residual: [T, hidden] → [T, hidden]"""
        attended = ops.attend(ops.linear(x, self.qkv_proj, norm=norm), self.heads)
        return ops.linear(attended, self.o_proj, residual=residual, scale=scale)
