"""Operators around latent attention, in torch."""

import torch
from torch import Tensor
from torch.nn import functional

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
    rank = len(norm.weight)
    normed = functional.rms_norm(latent[:, :rank], (rank,), norm.weight, norm.eps)
    rotated = _rotated(latent[:, None, rank:], rotation, is_interleaved)
    entries = torch.cat((normed, rotated.squeeze(1)), 1)
    if kv_scales is not None:
        entries, scales = quantize_latents(entries, rank, kv_cache.dtype)
        kv_scales.view(-1, scales.shape[1]).index_copy_(0, slot_mapping, scales)
    kv_cache.view(-1, entries.shape[1]).index_copy_(0, slot_mapping, entries)


def latent_queries(query: Tensor, keys: Tensor, rotation: Tensor, is_interleaved: bool) -> Tensor:
    num_heads, nope_dim, _ = keys.shape
    by_head = torch.unflatten(query, 1, (num_heads, -1))
    absorbed = torch.bmm(by_head[..., :nope_dim].transpose(0, 1), keys).transpose(0, 1)
    rotated = _rotated(by_head[..., nope_dim:], rotation, is_interleaved)
    return torch.cat((absorbed, rotated), 2)


def latent_values(attended: Tensor, values: Tensor) -> Tensor:
    return torch.bmm(attended.transpose(0, 1), values.mT).transpose(0, 1).flatten(1)


def _rotated(x: Tensor, rotation: Tensor, is_interleaved: bool) -> Tensor:
    """[T, H, rope_dim]"""
    cos, sin = rotation.unsqueeze(2)
    return (rope_interleaved if is_interleaved else rope)(x, cos, sin)
