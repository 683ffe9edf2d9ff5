"""``rope_kv`` in torch: the operators one by one."""

import torch
from torch import Tensor

from kernels.kv_write import kv_write
from kernels.rms_norm import rms_norm
from kernels.rope import rope, rope_interleaved


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
    num_kv_heads, head_dim = kv_cache.shape[3:]
    split = torch.unflatten(heads, 1, (-1, head_dim))
    sizes = [split.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads]
    query, key, value = torch.split(split, sizes, 1)
    if query_norm is not None and key_norm is not None:
        query, key = rms_norm(query, query_norm, eps), rms_norm(key, key_norm, eps)
    cos, sin = table.index_select(1, positions).unsqueeze(2)
    rotate = rope_interleaved if is_interleaved else rope
    kv_write(kv_cache, rotate(key, cos, sin), value, slot_mapping)
    return rotate(query, cos, sin)
