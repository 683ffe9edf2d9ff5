"""``rope_kv`` in torch: one operator after another."""

import torch
from torch import Tensor

from kernels.kv_write import kv_write
from kernels.rms_norm import Norm, rms_norm
from kernels.rope import rope, rope_interleaved


def rope_kv(
    heads: Tensor,
    query_norm: Norm | None,
    key_norm: Norm | None,
    rotation: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
    kv_scales: Tensor | None = None,
) -> Tensor:
    num_kv_heads, head_dim = kv_cache.shape[3:]
    split = torch.unflatten(heads, 1, (-1, head_dim))
    num_heads = split.shape[1] - 2 * num_kv_heads
    rotary, value = split[:, :-num_kv_heads], split[:, -num_kv_heads:]
    if query_norm is not None and key_norm is not None:
        query, key = rotary[:, :num_heads], rotary[:, num_heads:]
        rotary = torch.cat((_normed(query, query_norm), _normed(key, key_norm)), 1)
    cos, sin = rotation.unsqueeze(2)
    rotate = rope_interleaved if is_interleaved else rope
    size = cos.shape[-1]
    rotated = rotate(rotary[..., :size], cos, sin)
    if size < head_dim:
        rotated = torch.cat((rotated, rotary[..., size:]), -1)
    kv_write(kv_cache, rotated[:, num_heads:], value, slot_mapping, kv_scales)
    return rotated[:, :num_heads]


def _normed(heads: Tensor, norm: Norm) -> Tensor:
    """[T, H, D]: norms each head, or all heads of a token together if the norm has that size."""
    if len(norm.weight) == heads.shape[2]:
        return rms_norm(heads, *norm)
    return rms_norm(heads.flatten(1), *norm).view(heads.shape)
