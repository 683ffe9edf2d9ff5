"""Reference of ``paged_attention``: loops over rows, tokens and heads in float32."""

import torch
from torch import Tensor

from kernels.paged_attention.batch import AttentionBatch
from kernels.paged_attention.grouped import PLAIN, AttentionOptions


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    options: AttentionOptions = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """query [T, H, D], kv_cache [num_blocks + 1, block_size, 2, H_kv, ≥ D] → [T, H, value_dim]."""
    out = query.new_empty(*query.shape[:2], options.value_dim or query.shape[2])
    for row, num_keys in enumerate(batch.num_keys.tolist()):
        start, end = batch.token_starts[row : row + 2].tolist()
        blocks = batch.block_tables[row].tolist()
        keys, values = _gather(kv_cache, kv_scales, blocks, num_keys)
        for token in range(start, end):
            end_key = num_keys - (end - 1 - token)
            first_key = 0 if batch.first_keys is None else int(batch.first_keys[row])
            if options.window is not None:
                first_key = max(first_key, end_key - options.window)
            if batch.ends is not None:
                end_key = max(end_key, int(batch.ends[token]))
            seen = slice(first_key, end_key)
            out[token] = _attend(query[token], keys[seen], values[seen], scale, options)
    return out


def _gather(kv_cache: Tensor, kv_scales: Tensor | None, blocks: list[int], num_keys: int) -> Tensor:
    """Keys and values of one row: [2, num_keys, H_kv, D] float32."""
    block_size = kv_cache.shape[1]
    places = [(blocks[i // block_size], i % block_size) for i in range(num_keys)]
    entries = torch.stack([kv_cache[place] for place in places], 1)
    if kv_scales is None:
        return entries.float()
    if entries.dtype == torch.uint8:
        entries = entries.view(torch.float8_e4m3fn)
    scales = torch.stack([kv_scales[place] for place in places], 1)
    return entries.float() * scales.unsqueeze(-1)


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, options: AttentionOptions
) -> Tensor:
    """One token: query [H, D], keys and values [num_seen, H_kv, ≥ D] → [H, value_dim]."""
    group_size = query.shape[0] // keys.shape[1]
    size = query.shape[1]
    heads = []
    for head, vector in enumerate(query.float()):
        kv_head = head // group_size
        scores = keys[:, kv_head, :size] @ vector * scale
        if options.softcap is not None:
            scores = torch.tanh(scores / options.softcap) * options.softcap
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks[head : head + 1].float()))
        weights = torch.softmax(scores, dim=0)[: len(keys)]
        heads.append(weights @ values[:, kv_head, : options.value_dim or size])
    return torch.stack(heads).to(query.dtype)
