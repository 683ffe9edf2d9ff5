"""The gated short convolution of LFM2 over a paged cache (arXiv 2511.23404).

A token's input is (b, c, u) of equal size. b · u is its entry in the cache, and the output is
c · (Σ_j w[:, j] · entry of the token ``width − 1 − j`` places before + bias). An entry is rounded
to the cache's dtype before it is used, so that the chunks of a prompt do not matter. It has several
parts, each in a cache of its own.

``reference.py`` computes it token by token; torch serves CPUs, Triton CUDA devices.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import runs_triton
from kernels.paged_attention import AttentionBatch, DeviceAttention
from kernels.paged_attention.device import flat_rows

NOWHERE = -1  # the place of a token before the first of a sequence


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    places: Tensor,
) -> Tensor:
    """x [T, 3 · size], weight [size, width], bias [size], caches [num_blocks + 1, block_size, …]
    each, slot_mapping [T] int64: block · block_size + offset of a token's entry, places
    [T, width − 1] int64 of earlier tokens' (``previous_places``) → [T, size].

    Writes the entries of the T tokens first.
    """
    if runs_triton(x):
        from kernels.short_conv.triton import launch

        return launch(x, weight, bias, caches, slot_mapping, places)
    b, c, u = x.chunk(3, 1)
    entries = [cache.flatten(2) for cache in caches]
    block_size, size = entries[0].shape[1:]
    parts = (b * u).to(entries[0].dtype).split(size, 1)
    for part, of_section in zip(parts, entries, strict=False):
        of_section[slot_mapping // block_size, slot_mapping % block_size, : part.shape[1]] = part
    num_parts = len(parts)
    seen = torch.cat([places, slot_mapping[:, None]], 1)  # [T, width], the token's own last
    found = seen.clamp(min=0)
    blocks, offsets = found // block_size, found % block_size
    gathered = [each[blocks, offsets] for each in entries[:num_parts]]  # [T, width, part]
    columns = torch.cat(gathered, 2)[:, :, : weight.shape[0]].float()
    columns = columns.masked_fill((seen < 0)[:, :, None], 0.0)
    summed = torch.zeros_like(columns[:, 0])
    for column in range(weight.shape[1]):  # in this order, as native code sums
        summed = summed + columns[:, column] * weight[:, column].float()
    if bias is not None:
        summed = summed + bias.float()
    return (c.float() * summed).to(x.dtype)


def previous_places(
    attention: AttentionBatch | DeviceAttention, num_tokens: int, num: int
) -> Tensor:
    """The places [T, num] int64, block · block_size + offset, of the ``num`` tokens before each of
    the T tokens, the farthest first; negative before the first token of a sequence."""
    if isinstance(attention, AttentionBatch):
        return torch.from_numpy(_on_host(attention, num)).to(attention.device)
    rows = flat_rows(attention.decode, attention.chunks, num_tokens)
    row = rows.token_rows.long()
    tokens = torch.arange(num_tokens, device=row.device)
    positions = rows.starts[row] + tokens - rows.token_starts[row]
    size = attention.block_size
    seen = positions[:, None] - torch.arange(num, 0, -1, device=row.device)
    numbers = seen.clamp(min=0)
    tables = attention.tables[rows.slots[row].long()]
    blocks = tables.gather(1, numbers // size).long()
    return torch.where(seen < 0, NOWHERE, blocks * size + numbers % size)


def _on_host(batch: AttentionBatch, num: int) -> np.ndarray:
    nums = np.diff(batch.token_starts)
    rows = np.repeat(np.arange(len(nums)), nums)
    ends = (batch.num_keys - batch.token_starts[1:])[rows]
    positions = np.arange(len(rows)) + ends
    seen = positions[:, None] - np.arange(num, 0, -1)
    blocks = batch.block_tables[rows[:, None], np.maximum(seen, 0) // batch.block_size]
    places: np.ndarray = blocks * batch.block_size + seen % batch.block_size
    return np.where(seen < 0, NOWHERE, places)
