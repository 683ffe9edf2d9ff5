"""Steps over a cache of latents, and their results."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.latent import latent_queries, latent_values, reference, write_latents
from kernels.paged_attention import AttentionOptions, attend, prepare_attention
from kernels.rms_norm import Norm
from tests.kernels.attended import MAX_BLOCKS, Step, device_attention
from tests.kernels.rotations import rotation_table

EPS = 1e-6
# In bfloat16 queries in latent space are rounded, and so are the scores.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
CPU = torch.device("cpu")


class Shape(NamedTuple):
    num_heads: int
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def entry_dim(self) -> int:
        return self.rank + self.rope_dim


SMALL = Shape(4, 32, 16, 16, 24)


def compare(
    step: Step,
    shape: Shape,
    dtype: torch.dtype = torch.float32,
    *,
    is_interleaved: bool = False,
    device: torch.device = CPU,
    knows_lengths: bool = False,
) -> None:
    """Asserts that cache entries and outputs of a step equal the reference's, with NaN in all
    invisible entries. The lengths are known to the host (``knows_lengths``) or only to the
    device."""
    starts, num_tokens = step.rows.T
    num_keys, total = starts + num_tokens, int(num_tokens.sum())
    num_blocks = len(step.rows) * MAX_BLOCKS
    tables = np.random.default_rng().permutation(num_blocks).reshape(-1, MAX_BLOCKS)
    cache = torch.full((num_blocks + 1, step.block_size, 1, 1, shape.entry_dim), torch.nan)
    cache = cache.to(dtype)
    rows = np.repeat(np.arange(len(starts)), num_tokens)
    positions = np.concatenate([np.arange(*each) for each in zip(starts, num_keys, strict=True)])
    slots = tables[rows, positions // step.block_size] * step.block_size
    slots = torch.from_numpy(slots + positions % step.block_size)

    query = torch.randn(total, shape.num_heads * (shape.nope_dim + shape.rope_dim)).to(dtype)
    latent = torch.randn(total, shape.entry_dim).to(dtype)
    norm = Norm((torch.rand(shape.rank) + 0.5).to(dtype), EPS)
    rotation = rotation_table(total, shape.rope_dim, is_interleaved)
    weight = torch.randn(shape.num_heads, shape.nope_dim + shape.value_dim, shape.rank)
    weight = (weight * shape.rank**-0.5).to(dtype)
    scale = shape.nope_dim**-0.5

    first_keys = np.zeros_like(starts) if step.first_keys is None else step.first_keys
    for row, start in enumerate(starts.tolist()):
        before = np.arange(first_keys[row], start)
        kept = torch.randn(len(before), 1, 1, shape.entry_dim).to(dtype)
        cache[tables[row, before // step.block_size], before % step.block_size] = kept
    entries = reference.entries(latent, norm, rotation, is_interleaved)
    whole = cache.flatten(0, 3).clone()
    whole[slots] = entries
    seen = [
        whole[_slots(tables[row], np.arange(first_keys[row], position + 1), step.block_size)]
        for row, position in zip(rows, positions, strict=True)
    ]
    keys, values = weight.split([shape.nope_dim, shape.value_dim], 1)
    expected = reference.attend(query, rotation, seen, keys, values, scale, is_interleaved)

    query, latent, rotation, slots, weight, cache = (
        each.to(device) for each in (query, latent, rotation, slots, weight, cache)
    )
    keys, values = weight.split([shape.nope_dim, shape.value_dim], 1)
    norm = Norm(norm.weight.to(device), EPS)
    write_latents(latent, norm, rotation, slots, cache, is_interleaved)
    queries = latent_queries(query, keys, rotation, is_interleaved)
    options = AttentionOptions(value_dim=shape.rank)
    if knows_lengths:
        batch = prepare_attention(
            num_tokens, num_keys, tables, step.block_size, dtype, device, step.first_keys
        )
        attended = attend(queries, cache.nan_to_num(), batch, scale, options)
    else:
        with device:
            on_device = device_attention(step, tables)
        attended = attend(queries, cache, on_device, scale, options)
    found = latent_values(attended, values)

    tolerance = TOLERANCES[dtype]
    close: dict[str, Any] = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(cache.cpu().flatten(0, 3)[slots.cpu()], entries, **close)
    torch.testing.assert_close(found.cpu().float(), expected, **close)


def _slots(table: np.ndarray, keys: np.ndarray, block_size: int) -> Tensor:
    return torch.from_numpy(table[keys // block_size] * block_size + keys % block_size)
