"""Attention over the paged KV cache."""

from torch import nn

from services.worker.layers.heads import AttentionSpec, Heads
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import Ops, X
from services.worker.layers.rope import RotaryEmbedding


class Attention(nn.Module):
    """Grouped-query self-attention (arXiv 2305.13245), from the product that makes queries, keys
    and values to the one behind it.

    ``layer`` is the place of its KV cache in the context.
    """

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        layer: int,
        rotary: RotaryEmbedding,
        eps: float,
        *,
        has_qkv_bias: bool = False,
        has_out_bias: bool = False,
    ) -> None:
        super().__init__()
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(hidden_size, sizes, has_qkv_bias)
        self.o_proj = Linear(query_size, hidden_size, has_out_bias)
        if spec.norm == "none":
            self.q_norm = self.k_norm = None
        else:
            is_each = spec.norm == "heads"
            self.q_norm = RMSNorm(spec.head_dim if is_each else query_size, eps)
            self.k_norm = RMSNorm(spec.head_dim if is_each else kv_size, eps)
        self.heads = Heads(spec, layer, self.q_norm, self.k_norm, rotary)

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
