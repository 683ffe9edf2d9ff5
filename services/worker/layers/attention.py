"""Attention over the paged KV cache."""

from typing import cast

import torch
from torch import Tensor, nn

from kernels.kv_write import kv_write
from kernels.paged_attention import AttentionBatch, paged_attention
from kernels.rms_norm import rms_norm
from services.worker.config.model_config import ModelConfig
from services.worker.layers.context import current_context
from services.worker.layers.linear import Linear, MergedLinear, empty_parameter
from services.worker.layers.rope import Rotation


class QKNorm(nn.Module):
    """RMS norms of each head, one for all queries and one for all keys.

    [T, num_heads + num_kv_heads, head_dim] → the same.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.query_weight = empty_parameter(head_dim)
        self.key_weight = empty_parameter(head_dim)
        self.sizes = [num_heads, num_kv_heads]
        self.eps = eps

    def checkpoint_pieces(self) -> dict[str, Tensor]:
        return {"q_norm.weight": self.query_weight, "k_norm.weight": self.key_weight}

    def forward(self, heads: Tensor) -> Tensor:
        query, key = torch.split(heads, self.sizes, 1)
        query = rms_norm(query, self.query_weight, self.eps)
        return torch.cat((query, rms_norm(key, self.key_weight, self.eps)), 1)


class Attention(nn.Module):
    """Grouped-query self-attention.

    ``layer`` is the index of its KV cache in the context.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        has_qkv_bias: bool = False,
        has_out_bias: bool = False,
        has_qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, sizes, has_qkv_bias)
        self.o_proj = Linear(query_size, config.hidden_size, has_out_bias)
        counts = (self.num_heads, self.num_kv_heads)
        self.qk_norm = (
            QKNorm(*counts, self.head_dim, config.rms_norm_eps) if has_qk_norm else nn.Identity()
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, hidden] → [T, hidden]; writes the KV of the T tokens first."""
        context = current_context()
        kv_cache = context.kv_caches[self.layer]
        num_rotary = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(x).view(len(x), num_rotary + self.num_kv_heads, self.head_dim)
        rotary, value = heads[:, :num_rotary], heads[:, num_rotary:]
        rotated = rotation(self.qk_norm(rotary))
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        kv_write(kv_cache, key, value, context.slot_mapping)
        rows = cast(AttentionBatch, context.attention)
        attended = paged_attention(query, kv_cache, rows, self.head_dim**-0.5)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out
