"""Attention over the paged KV cache."""

from torch import Tensor, nn

from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention
from kernels.rope import rope
from services.worker.context import current_context
from services.worker.layers.linear import Linear, MergedLinear
from services.worker.layers.rope import Rotation
from services.worker.model_config import ModelConfig


class Attention(nn.Module):
    """Grouped-query self-attention with biases on q, k and v.

    ``layer`` is the index of its KV cache in the context.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, sizes, bias=True)
        self.o_proj = Linear(query_size, config.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[T, hidden] → [T, hidden]; writes the KV of the T tokens first."""
        context = current_context()
        kv_cache = context.kv_caches[self.layer]
        num_rotary = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(x).view(len(x), num_rotary + self.num_kv_heads, self.head_dim)
        rotary, value = heads[:, :num_rotary], heads[:, num_rotary:]
        rotated = rope(rotary, *rotation)
        query, key = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        kv_write(kv_cache, key, value, context.slot_mapping)
        attended = paged_attention(query, kv_cache, context.attention, self.head_dim**-0.5)
        out: Tensor = self.o_proj(attended.flatten(1))
        return out
