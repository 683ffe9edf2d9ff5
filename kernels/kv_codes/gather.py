"""Copies of blocks of a KV cache, in numbers."""

import torch
from torch import Tensor

from kernels.kv_codes import dequantize
from kernels.kv_codes.latents import dequantize_latents


def gather(
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    blocks: Tensor,
    dtype: torch.dtype,
    rank: int | None = None,
) -> Tensor:
    """Copies ``blocks`` [N] of a cache, dequantized: [N, block_size, 2, H_kv, D], or [N,
    block_size, 1, 1, rank + rope_dim] of latents."""
    found = kv_cache.index_select(0, blocks)
    if kv_scales is None:
        return found
    scales = kv_scales.index_select(0, blocks)
    if kv_cache.shape[2] > 1:
        return dequantize(found, scales, dtype)
    assert rank is not None
    return dequantize_latents(found, scales, rank, dtype)
