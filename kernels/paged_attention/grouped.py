"""Paged attention as one fused call for each group of rows."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.paged_attention.batch import AttentionBatch, Group


def paged_attention(query: Tensor, kv_cache: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """query [T, H, D], kv_cache [num_blocks + 1, block_size, 2, H_kv, D] → [T, H, D].

    Keys and values are never repeated for the query heads that share them.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.empty_like(grouped)
    for group in batch.groups:
        tokens = slice(group.start, group.end)
        out[tokens] = _attend(group, grouped[tokens], kv_cache, scale)
    return out.flatten(1, 2)


def _attend(group: Group, query: Tensor, kv_cache: Tensor, scale: float) -> Tensor:
    """query [tokens of the group, H_kv, G, D] → the same shape."""
    gathered = kv_cache.index_select(0, group.blocks)
    gathered = gathered.view(group.num_rows, -1, *kv_cache.shape[2:])[:, : group.num_keys]
    key, value = gathered.permute(2, 0, 3, 1, 4)  # each [num_rows, H_kv, num_keys, D]
    if len(query) == group.num_rows:
        return scaled_dot_product_attention(query, key, value, group.mask, scale=scale)
    return _attend_chunk(group, query, key[0], value[0], scale)


def _attend_chunk(group: Group, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """One row: its KV heads are the batch, the query heads that share one are the heads."""
    shape = (-1, query.shape[2], -1, -1)
    out = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3),
        key.unsqueeze(1).expand(shape),
        value.unsqueeze(1).expand(shape),
        group.mask,
        is_causal=group.is_causal,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3)
