"""``attend`` in torch, over a copy of each row's keys and values."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.kv_codes.gather import gather
from kernels.paged_attention.batch import MAX_GATHERED_TOKENS
from kernels.paged_attention.device import ChunkRows, DecodeRows, DeviceAttention, seen_keys
from kernels.paged_attention.grouped import (
    PLAIN,
    AttentionOptions,
    keys_and_values,
    softmax_attention,
)


class _Cache(NamedTuple):
    numbers: Tensor
    scales: Tensor | None

    @property
    def block_size(self) -> int:
        return self.numbers.shape[1]


def attend(
    query: Tensor,
    kv_cache: Tensor,
    attention: DeviceAttention,
    scale: float,
    options: AttentionOptions = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    cache = _Cache(kv_cache, kv_scales)
    out = query.new_empty(*query.shape[:2], options.value_dim or query.shape[2])
    decode, chunks = attention.decode, attention.chunks
    num_decoded = 0 if decode is None else decode.num_tokens
    if decode is not None:
        rows = torch.unflatten(query[:num_decoded], 0, (-1, decode.width))
        attended = _decode(rows, cache, decode, attention, scale, options)
        out[:num_decoded] = attended.flatten(0, 1)
    if chunks is not None:
        _attend_chunks(out, query, cache, chunks, attention.tables, scale, options)
    return out


def _decode(
    query: Tensor,
    cache: _Cache,
    rows: DecodeRows,
    attention: DeviceAttention,
    scale: float,
    options: AttentionOptions,
) -> Tensor:
    """query [B, width, H, D] → [B, width, H, value_dim], in groups of rows whose copies have a
    bound."""
    num_keys = min(attention.max_keys, attention.tables.shape[1] * cache.block_size)
    positions = rows.starts.unsqueeze(1) + torch.arange(rows.width, device=query.device)
    is_seen = seen_keys(positions, num_keys, rows.first_keys, options.window)
    tables = attention.tables[rows.slots]
    num_rows = max(1, MAX_GATHERED_TOKENS // num_keys)
    parts = zip(*(torch.split(each, num_rows) for each in (query, tables, is_seen)), strict=True)
    return torch.cat(
        [_attend(part, cache, blocks, seen, scale, options) for part, blocks, seen in parts]
    )


def _attend_chunks(
    out: Tensor,
    query: Tensor,
    cache: _Cache,
    chunks: ChunkRows,
    tables: Tensor,
    scale: float,
    options: AttentionOptions,
) -> None:
    """Computes the chunks' tokens: query [T, H, D] → out [T, H, value_dim]."""
    bounds = pairwise(chunks.host_token_starts.tolist())
    for row, (position, (start, end)) in enumerate(
        zip(chunks.host_starts.tolist(), bounds, strict=True)
    ):
        if start == end:
            continue
        after = position + end - start
        num_keys = min(after, tables.shape[1] * cache.block_size)
        positions = torch.arange(position, after, device=query.device).unsqueeze(0)
        first_keys = None if chunks.first_keys is None else chunks.first_keys[row : row + 1]
        ends = None if chunks.ends is None else chunks.ends[None, start:end]
        is_seen = seen_keys(positions, num_keys, first_keys, options.window, ends)
        blocks = tables[chunks.slots[row : row + 1]]
        part = query[None, start:end]
        out[start:end] = _attend(part, cache, blocks, is_seen, scale, options)[0]


def _attend(
    query: Tensor,
    cache: _Cache,
    tables: Tensor,
    is_seen: Tensor,
    scale: float,
    options: AttentionOptions,
) -> Tensor:
    """query [R, tokens, H, D], tables [R, max_blocks], is_seen [R, tokens, num_keys] → [R, tokens,
    H, value_dim].

    NaN or ±inf times a weight of 0 is NaN. Keys and values that are not finite are therefore
    zeroed, and the tokens that see one become NaN explicitly.
    """
    num_keys, num_kv_heads = is_seen.shape[2], cache.numbers.shape[3]
    blocks = tables[:, : -(-num_keys // cache.block_size)]
    copied = gather(*cache, blocks.flatten(), query.dtype, options.value_dim)
    gathered = copied.unflatten(0, blocks.shape)
    gathered = gathered.flatten(1, 2)[:, :num_keys]  # [R, num_keys, 2 or 1, H_kv, ≥ D]
    key, value = keys_and_values(gathered, query.shape[3], options)
    is_bad = None
    # Skipped on a GPU: the host would wait for the result.
    if query.is_cuda or not (key.sum() + value.sum()).isfinite():
        is_bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))  # [R, H_kv, num_keys]
        key, value = (each.where(each.isfinite(), 0) for each in (key, value))
    shared = torch.unflatten(query, 2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
    group_size, num_tokens = shared.shape[2:4]
    mask = is_seen[:, None].repeat(1, 1, group_size, 1)  # [R, 1, G * tokens, num_keys]
    if options.sinks is not None:
        sinks = options.sinks.repeat_interleave(num_tokens)
        options = options._replace(sinks=sinks.view(num_kv_heads, -1, 1))
    out = softmax_attention(shared.flatten(2, 3), key, value, scale, options, mask)
    out = torch.unflatten(out, 2, (group_size, num_tokens))  # [R, H_kv, G, tokens, value_dim]
    if is_bad is not None:
        seen = is_seen.to(out.dtype) @ is_bad.mT.to(out.dtype)
        sees_bad = (seen > 0).mT  # [R, H_kv, tokens]
        out = out.masked_fill(sees_bad[:, :, None, :, None], torch.nan)
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3)[..., : options.value_dim or query.shape[3]]
