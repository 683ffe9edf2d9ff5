"""Operators around multi-head latent attention (arXiv 2405.04434). The cache has one row per token:
the latent [rank], then the key [rope_dim] shared by all heads.

Keys and values of heads are never materialized. The key projection U [nope_dim, rank] is applied to
the query, and the value projection V [value_dim, rank] to the attended sum of latents. A cache row
is thus the key of all heads, and its beginning their value.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.dispatch import runs_triton
from kernels.kv_codes.latents import quantize_latents
from kernels.rms_norm import Norm
from kernels.rope import rope, rope_interleaved


def write_latents(
    latent: Tensor,
    norm: Norm,
    rotation: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    is_interleaved: bool,
    kv_scales: Tensor | None = None,
) -> None:
    """Writes latent [T, rank + rope_dim] to the entries ``slot_mapping`` [T] int64 of kv_cache
    [num_blocks + 1, block_size, 1, 1, rank + rope_dim]. The first part is normed, the rest rotated
    by rotation [2, T, rope_dim] float32. With ``kv_scales`` [num_blocks + 1, block_size, 1, 1,
    num_groups] float32 the first part is quantized, and an entry has ``entry_size`` bytes in place
    of rank + rope_dim numbers (``kv_codes.latents``)."""
    if runs_triton(latent):
        from kernels.latent import triton

        triton.write_latents(
            latent, norm, rotation, slot_mapping, kv_cache, is_interleaved, kv_scales
        )
        return
    rank = len(norm.weight)
    normed = functional.rms_norm(latent[:, :rank], (rank,), norm.weight, norm.eps)
    rotated = _rotated(latent[:, None, rank:], rotation, is_interleaved)
    entries = torch.cat((normed, rotated.squeeze(1)), 1)
    if kv_scales is not None:
        entries, scales = quantize_latents(entries, rank, kv_cache.dtype)
        kv_scales.view(-1, scales.shape[1]).index_copy_(0, slot_mapping, scales)
    kv_cache.view(-1, entries.shape[1]).index_copy_(0, slot_mapping, entries)


def latent_queries(query: Tensor, keys: Tensor, rotation: Tensor, is_interleaved: bool) -> Tensor:
    """query [T, H * (nope_dim + rope_dim)], keys [H, nope_dim, rank] → [T, H, rank + rope_dim]."""
    if runs_triton(query):
        from kernels.latent import triton

        return triton.latent_queries(query, keys, rotation, is_interleaved)
    num_heads, nope_dim, _ = keys.shape
    by_head = torch.unflatten(query, 1, (num_heads, -1))
    absorbed = torch.bmm(by_head[..., :nope_dim].transpose(0, 1), keys).transpose(0, 1)
    rotated = _rotated(by_head[..., nope_dim:], rotation, is_interleaved)
    return torch.cat((absorbed, rotated), 2)


def latent_values(attended: Tensor, values: Tensor) -> Tensor:
    """attended [T, H, rank], values [H, value_dim, rank] → [T, H * value_dim]."""
    if runs_triton(attended):
        from kernels.latent import triton

        return triton.latent_values(attended, values)
    return torch.bmm(attended.transpose(0, 1), values.mT).transpose(0, 1).flatten(1)


def _rotated(x: Tensor, rotation: Tensor, is_interleaved: bool) -> Tensor:
    """[T, H, rope_dim]"""
    cos, sin = rotation.unsqueeze(2)
    return (rope_interleaved if is_interleaved else rope)(x, cos, sin)
