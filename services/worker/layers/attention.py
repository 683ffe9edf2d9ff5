"""Attention over the paged KV cache."""

from dataclasses import replace

import numpy as np

from services.worker.layers.heads import AttentionSpec, Heads
from services.worker.layers.kept import Cached
from services.worker.layers.linear import Linear, WeightPiece
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.parallel import Parallel, Rows, Shard
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import empty_parameter
from services.worker.machine.kv_groups import KVSpec


class Attention(Cached):
    """Grouped-query self-attention (arXiv 2305.13245), from the GEMM of queries, keys and values to
    the output GEMM. ``spec`` counts the heads of all ranks; each rank has its own heads.

    ``layer`` is its number in the model. If it ``has_gate``, q_proj has a head's query and then its
    gate, which is multiplied with the head's output (arXiv 2505.06708).
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
        has_gate: bool = False,
    ) -> None:
        super().__init__()
        heads, kv_heads = parallel.heads(spec.num_heads, spec.num_kv_heads)
        spec = replace(spec, num_heads=heads.num, num_kv_heads=kv_heads.num)
        query, kv = heads.times(spec.head_dim), kv_heads.times(spec.head_dim)
        queries, gates = _split_heads(heads, spec.head_dim) if has_gate else (query, None)
        self.qkv_proj = Linear(
            hidden_size, {"q_proj": queries, "k_proj": kv, "v_proj": kv}, has_qkv_bias
        )
        self.gate_proj = (
            None if gates is None else Linear(hidden_size, {"q_proj": gates}, has_qkv_bias)
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
        self.heads = self.heads._replace(layer=place, group=group)

    @property
    def kv_spec(self) -> KVSpec:
        spec = self.heads.spec
        return KVSpec((2, spec.num_kv_heads, spec.head_dim), spec.window)

    @property
    def numbers_per_token(self) -> int:
        """The numbers of a token's queries, keys and values, of their rotation, and of gates."""
        spec = self.heads.spec
        of_gate = 0 if self.gate_proj is None else 5 * self.gate_proj.outputs
        return 5 * (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim + of_gate

    @property
    def num_scored_heads(self) -> int:
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
        if self.gate_proj is not None:
            attended = ops.gate(attended, ops.linear(x, self.gate_proj, norm=norm))
        return ops.linear(attended, self.o_proj, residual=residual, scale=scale)


def _split_heads(heads: Shard, head_dim: int) -> tuple[Rows, Rows]:
    """The rows of ``heads``' queries, and of their gates."""
    ids = np.arange(2 * heads.total * head_dim).reshape(heads.total, 2, head_dim)
    queries, gates = ids[heads.start : heads.start + heads.num].swapaxes(0, 1)
    return Rows(queries.ravel(), ids.size), Rows(gates.ravel(), ids.size)
