"""Steps over a cache of latents, and their results."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.kv_codes.latents import GROUP, dequantize_latents, quantize_latents
from kernels.kv_layout import LayerKV
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
    codes: torch.dtype | None = None,
) -> None:
    """Asserts that cache entries and outputs of a step equal the reference's, with NaN in all
    invisible entries. The lengths are known to the host (``knows_lengths``) or only to the
    device. The cache may be quantized to ``codes``."""
    starts, num_tokens = step.rows.T
    num_keys, total = starts + num_tokens, int(num_tokens.sum())
    num_blocks = len(step.rows) * MAX_BLOCKS
    tables = np.random.default_rng().permutation(num_blocks).reshape(-1, MAX_BLOCKS)
    numbers = torch.full((num_blocks + 1, step.block_size, 1, 1, shape.entry_dim), torch.nan)
    numbers = (numbers.nan_to_num() if knows_lengths else numbers).to(dtype)
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
        numbers[tables[row, before // step.block_size], before % step.block_size] = kept
    cache = in_codes(numbers, shape.rank, codes, device)
    on_card = [each.to(device) for each in (latent, norm.weight, rotation, slots)]
    new, norm_weight, turns, places = on_card
    arguments = turns, places, cache.entries, is_interleaved, cache.scales
    write_latents(new, Norm(norm_weight, EPS), *arguments)
    whole = numbers_of(cache, shape.rank, dtype).flatten(0, 3).cpu()
    entries = reference.entries(latent, norm, rotation, is_interleaved)
    assert_near(whole[slots], entries, shape.rank, codes, TOLERANCES[dtype])
    seen = [
        whole[_slots(tables[row], np.arange(first_keys[row], position + 1), step.block_size)]
        for row, position in zip(rows, positions, strict=True)
    ]
    keys, values = weight.split([shape.nope_dim, shape.value_dim], 1)
    expected = reference.attend(query, rotation, seen, keys, values, scale, is_interleaved)

    query, weight = query.to(device), weight.to(device)
    keys, values = weight.split([shape.nope_dim, shape.value_dim], 1)
    queries = latent_queries(query, keys, turns, is_interleaved)
    options = AttentionOptions(value_dim=shape.rank)
    if knows_lengths:
        batch = prepare_attention(
            num_tokens, num_keys, tables, step.block_size, dtype, device, step.first_keys
        )
        attended = attend(queries, cache.entries, batch, scale, options, cache.scales)
    else:
        with device:
            on_device = device_attention(step, tables)
        attended = attend(queries, cache.entries, on_device, scale, options, cache.scales)
    found = latent_values(attended, values)

    tolerance = TOLERANCES[dtype]
    close: dict[str, Any] = {"atol": tolerance, "rtol": tolerance}
    torch.testing.assert_close(found.cpu().float(), expected, **close)


def in_codes(
    numbers: Tensor, rank: int, codes: torch.dtype | None, device: torch.device
) -> LayerKV:
    """A cache with ``numbers`` [num_blocks + 1, block_size, 1, 1, rank + rope_dim]."""
    if codes is None:
        return LayerKV(numbers.to(device))
    stored, scales = quantize_latents(numbers.flatten(0, 3), rank, codes)
    parts = (each.view(*numbers.shape[:4], -1).to(device) for each in (stored, scales))
    return LayerKV(*parts)


def numbers_of(cache: LayerKV, rank: int, dtype: torch.dtype) -> Tensor:
    if cache.scales is None:
        return cache.entries
    return dequantize_latents(cache.entries, cache.scales, rank, dtype)


def assert_near(
    found: Tensor, expected: Tensor, rank: int, codes: torch.dtype | None, tolerance: float
) -> None:
    """Codes differ by one step at most."""
    sizes = expected.abs().float()
    close = tolerance + tolerance * sizes
    if codes is not None:
        for own, group in zip(
            close[:, :rank].split(GROUP, 1), sizes[:, :rank].split(GROUP, 1), strict=True
        ):
            highest = group.amax(1, keepdim=True)
            own += highest / 127 if codes == torch.int8 else group / 8 + highest / 448 / 512
    assert ((found - expected).abs() <= close).all()


def _slots(table: np.ndarray, keys: np.ndarray, block_size: int) -> Tensor:
    return torch.from_numpy(table[keys // block_size] * block_size + keys % block_size)
