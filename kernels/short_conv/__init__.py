"""The gated short convolution of LFM2 over a paged cache (arXiv 2511.23404).

A token's input is (b, c, u) of equal size. b · u is its entry in the cache, and the output is
c · (Σ_j w[:, j] · entry of the token ``width − 1 − j`` places before + bias). An entry is rounded
to the cache's dtype before it is used, so that the chunks of a prompt do not matter. It has several
parts, each in the cache of one section (``services/worker/machine/kv_groups.py``).

``reference.py`` computes it token by token; torch serves CPUs, Triton CUDA devices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.dispatch import runs_triton


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
    entries = [cache.flatten(0, 1).flatten(1) for cache in caches]
    parts = (b * u).to(entries[0].dtype).split(entries[0].shape[1], 1)
    for part, of_section in zip(parts, entries, strict=False):
        of_section[slot_mapping, : part.shape[1]] = part
    num_parts = len(parts)
    seen = torch.cat([places, slot_mapping[:, None]], 1)  # [T, width], the token's own last
    gathered = [each[seen.clamp(min=0)] for each in entries[:num_parts]]  # [T, width, part]
    columns = torch.cat(gathered, 2)[:, :, : weight.shape[0]].float()
    columns = columns.masked_fill((seen < 0)[:, :, None], 0.0)
    summed = torch.zeros_like(columns[:, 0])
    for column in range(weight.shape[1]):  # in this order, as native code sums
        summed = summed + columns[:, column] * weight[:, column].float()
    if bias is not None:
        summed = summed + bias.float()
    return (c.float() * summed).to(x.dtype)
