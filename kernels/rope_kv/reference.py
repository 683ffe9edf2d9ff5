"""Reference of ``rope_kv``."""

import torch
from torch import Tensor

from kernels.kv_write import reference as kv_write
from kernels.rms_norm import Norm
from kernels.rms_norm import reference as rms_norm
from kernels.rope import reference as rope


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
    """Head by head; each step is the reference of its own operator."""
    num_kv_heads, head_dim = kv_cache.shape[3:]
    split = list(torch.unflatten(heads, 1, (-1, head_dim)).unbind(1))
    num_heads = len(split) - 2 * num_kv_heads
    cos, sin = rotation  # each [T, R]
    rotate = rope.rope_interleaved if is_interleaved else rope.rope
    split[:num_heads] = _normed(split[:num_heads], query_norm)
    split[num_heads:-num_kv_heads] = _normed(split[num_heads:-num_kv_heads], key_norm)
    for head in range(num_heads + num_kv_heads):
        turned = rotate(split[head][:, : cos.shape[1]], cos, sin)
        split[head] = torch.cat((turned, split[head][:, cos.shape[1] :]), 1)
    joined = torch.stack(split, 1)
    query = joined[:, :num_heads]
    key, value = joined[:, num_heads:].chunk(2, 1)
    kv_write.kv_write(kv_cache, key, value, slot_mapping, kv_scales)
    return query


def _normed(heads: list[Tensor], norm: Norm | None) -> list[Tensor]:
    """Each [T, D]."""
    if norm is None:
        return heads
    if len(norm.weight) == heads[0].shape[1]:
        return [rms_norm.rms_norm(head, *norm) for head in heads]
    return list(rms_norm.rms_norm(torch.cat(heads, 1), *norm).chunk(len(heads), 1))
