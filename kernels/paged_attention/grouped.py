"""Paged attention as one call of torch's attention for each group of rows."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.kv_codes.gather import gather
from kernels.paged_attention.batch import AttentionBatch, Group


class AttentionOptions(NamedTuple):
    """Options of a layer's attention besides its scale.

    ``window``: a token sees the last ``window`` keys, its own included. ``softcap``: scores are
    bounded by a tanh (arXiv 2408.00118). ``sinks`` [H]: a score of each head that takes its share
    of the softmax and adds no value (arXiv 2309.17453, as in gpt-oss). ``value_dim``: the size of a
    value if smaller than a key's; in a cache of keys alone, the first elements of a key are its
    value. ``chosen`` [T, num_keys] bool: a token attends to these of its row's keys; the steps of
    the host alone have it, and with no keys it is as None (``kernels.index``).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    value_dim: int | None = None
    chosen: Tensor | None = None


PLAIN = AttentionOptions()
# The most scores materialized at once, for options torch's fused attention lacks. Unmeasured.
MAX_SCORES = 4 << 20


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    batch: AttentionBatch,
    scale: float,
    options: AttentionOptions = PLAIN,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """query [T, H, D], kv_cache [num_blocks + 1, block_size, 2 or 1, H_kv, ≥ D] → [T, H,
    value_dim].

    Keys and values are never repeated for the query heads that share them.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[3]
    grouped = query.view(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = query.new_empty(*grouped.shape[:3], options.value_dim or head_dim)
    for group in batch.groups(options.window):
        tokens = slice(group.start, group.end)
        group = _with_choice(group, options.chosen, query.dtype)
        gathered = gather(kv_cache, kv_scales, group.blocks, query.dtype, options.value_dim)
        attended = _attend(group, grouped[tokens], gathered, scale, options)
        out[tokens] = attended[..., : out.shape[-1]]
    return out.flatten(1, 2)


def _with_choice(group: Group, chosen: Tensor | None, dtype: torch.dtype) -> Group:
    """A choice is of visible keys, so that it replaces the mask."""
    if chosen is None or not chosen.shape[1]:
        return group
    own = chosen[group.start : group.end, : group.num_keys]
    mask = torch.zeros(own.shape, dtype=dtype).masked_fill_(~own, float("-inf"))
    is_decoding = len(own) == group.num_rows
    return replace(group, mask=mask[:, None, None] if is_decoding else mask)


def _attend(
    group: Group, query: Tensor, gathered: Tensor, scale: float, options: AttentionOptions
) -> Tensor:
    """query [tokens of the group, H_kv, G, D], gathered [blocks of the group, block_size, 2 or 1,
    H_kv, ≥ D] → [tokens, H_kv, G, ≥ value_dim]."""
    head_dim = query.shape[-1]
    gathered = gathered.view(group.num_rows, -1, *gathered.shape[2:])[:, : group.num_keys]
    key, value = keys_and_values(gathered, head_dim, options)
    if len(query) == group.num_rows:
        options = _with_sinks(options, *query.shape[1:3], 1)
        return softmax_attention(query, key, value, scale, options, group.mask)
    return _attend_chunk(group, query, key[0], value[0], scale, options)


def keys_and_values(
    gathered: Tensor, head_dim: int, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """gathered [R, num_keys, 2 or 1, H_kv, ≥ D] → each [R, H_kv, num_keys, …].

    Keys that are also values keep their full width as values: torch's fused attention requires
    equal sizes, and would otherwise materialize all scores.
    """
    planes = gathered.permute(2, 0, 3, 1, 4)
    key = planes[0, ..., :head_dim]
    if len(planes) == 1:
        return key, key
    return key, planes[1, ..., : options.value_dim or head_dim]


def _attend_chunk(
    group: Group,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: AttentionOptions,
) -> Tensor:
    """One row as a batch of its KV heads, with the query heads of each as heads."""
    heads = query.shape[1:3]
    key, value = (each.unsqueeze(1).expand(-1, heads[1], -1, -1) for each in (key, value))
    options = _with_sinks(options, *heads, 1, 1)
    by_head = query.permute(1, 2, 0, 3)
    out = softmax_attention(
        by_head, key, value, scale, options, group.mask, is_causal=group.is_causal
    )
    return out.permute(2, 0, 1, 3)


def _with_sinks(options: AttentionOptions, *shape: int) -> AttentionOptions:
    return options if options.sinks is None else options._replace(sinks=options.sinks.view(shape))


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: AttentionOptions,
    mask: Tensor | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """[B, H, tokens, …] each → [B, H, tokens, value_dim]; sinks join the scores. ``mask`` is added
    to the scores, or is bool and selects them; it includes the window."""
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale
        )
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device)
        mask = mask.tril()
    num_tokens = max(1, MAX_SCORES // (query.shape[:-2].numel() * key.shape[-2]))
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    for start in range(0, query.shape[-2], num_tokens):
        part = slice(start, start + num_tokens)
        own = options._replace(sinks=_rows(options.sinks, part))
        out[..., part, :] = _score(query[..., part, :], key, value, scale, own, _rows(mask, part))
    return out


def _rows(each: Tensor | None, part: slice) -> Tensor | None:
    """The rows of some tokens, or None or a broadcast tensor unchanged."""
    return each if each is None or each.shape[-2] == 1 else each[..., part, :]


def _score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    options: AttentionOptions,
    mask: Tensor | None,
) -> Tensor:
    scores = (query @ key.mT).float() * scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, float("-inf")) if is_bool else scores + mask
    if options.sinks is not None:
        sinks = options.sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights.to(value.dtype) @ value
