"""The readable truth of ``rope_kv``."""

import torch
from torch import Tensor

from kernels.kv_write import reference as kv_write
from kernels.rms_norm import reference as rms_norm
from kernels.rope import reference as rope


def rope_kv(
    heads: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    table: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
) -> Tensor:
    """Head by head; each step is its own operator's reference."""
    num_kv_heads, head_dim = kv_cache.shape[3:]
    split = list(torch.unflatten(heads, 1, (-1, head_dim)).unbind(1))
    num_heads = len(split) - 2 * num_kv_heads
    cos, sin = table[0][positions], table[1][positions]  # [T, D]
    rotate = rope.rope_interleaved if is_interleaved else rope.rope
    for head in range(num_heads + num_kv_heads):
        norm = query_norm if head < num_heads else key_norm
        if norm is not None:
            split[head] = rms_norm.rms_norm(split[head], norm, eps)
        split[head] = rotate(split[head], cos, sin)
    joined = torch.stack(split, 1)
    query = joined[:, :num_heads]
    key, value = joined[:, num_heads:].chunk(2, 1)
    kv_write.kv_write(kv_cache, key, value, slot_mapping)
    return query
