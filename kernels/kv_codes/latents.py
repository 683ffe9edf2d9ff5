"""Latents quantized to 8 bits, with a scale for each ``GROUP`` of a token's numbers.

An entry is the codes of a latent [rank] and then the bytes of its key [rope_dim], which stays
numbers: a key is rotated by its position, and all heads' scores depend on it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.kv_codes import dequantize, quantize
from kernels.sizes import cdiv

GROUP = 128  # also in kernels/cpu/latent.h


def num_groups(rank: int) -> int:
    return cdiv(rank, GROUP)


def entry_size(rank: int, rope_dim: int, dtype: torch.dtype) -> int:
    """Bytes, without the scales."""
    return rank + rope_dim * dtype.itemsize


def quantize_latents(entries: Tensor, rank: int, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """entries [T, rank + rope_dim] → [T, entry_size] of the type ``codes``, and scales [T,
    num_groups] float32."""
    latents, keys = entries[:, :rank], entries[:, rank:]
    stored, scales = quantize(_grouped(latents), codes)
    return torch.cat((stored.flatten(1)[:, :rank], keys.contiguous().view(codes)), 1), scales


def dequantize_latents(stored: Tensor, scales: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """stored [..., entry_size], scales [..., num_groups] → [..., rank + rope_dim]."""
    latents = dequantize(_grouped(stored[..., :rank]), scales, dtype).flatten(-2)[..., :rank]
    keys = stored[..., rank:].clone(memory_format=torch.contiguous_format).view(dtype)
    return torch.cat((latents, keys), -1)


def _grouped(x: Tensor) -> Tensor:
    """x [..., rank] → [..., num_groups, GROUP]; zeros fill the last group."""
    missing = -x.shape[-1] % GROUP
    return torch.unflatten(functional.pad(x, (0, missing)), -1, (-1, GROUP))
