"""What ``rope_kv`` makes of random heads."""

from typing import Any, Literal

import torch
from torch import Tensor

from kernels.rms_norm import Norm
from kernels.rope_kv import reference, rope_kv

EPS = 1e-6
NUM_KV_SLOTS = 24
# Products are rounded in another order: a bfloat16 may become its neighbour.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
CPU = torch.device("cpu")


def compare(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    norm: Literal["none", "heads", "tokens"] = "heads",
    is_interleaved: bool = False,
    device: torch.device = CPU,
) -> None:
    """Asserts that queries and caches agree."""
    heads = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    nums = {"none": (), "heads": (1, 1), "tokens": (num_heads, num_kv_heads)}[norm]
    weights = [torch.rand(num * head_dim).to(dtype) + 0.5 for num in nums]
    rotation = rotation_table(num_tokens, head_dim, is_interleaved)
    slot_mapping = torch.randperm(NUM_KV_SLOTS)[:num_tokens]
    expected_cache = torch.randn(NUM_KV_SLOTS // 4, 4, 2, num_kv_heads, head_dim).to(dtype)
    cache = expected_cache.to(device, copy=True)
    expected = reference.rope_kv(
        heads, *_norms(weights), rotation, slot_mapping, expected_cache, is_interleaved
    )
    heads, rotation, slot_mapping, *weights = (
        each.to(device) for each in (heads, rotation, slot_mapping, *weights)
    )
    actual = rope_kv(heads, *_norms(weights), rotation, slot_mapping, cache, is_interleaved)
    close: dict[str, Any] = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(actual.cpu(), expected, **close)
    torch.testing.assert_close(cache.cpu(), expected_cache, **close)


def _norms(weights: list[Tensor]) -> tuple[Norm | None, Norm | None]:
    """Of queries and keys."""
    query, key = weights or (None, None)
    return query if query is None else Norm(query, EPS), key if key is None else Norm(key, EPS)


def rotation_table(num_positions: int, head_dim: int, is_interleaved: bool) -> Tensor:
    """Cosines and signed sines of random angles: [2, num_positions, head_dim] float32."""
    angles = torch.randn(num_positions, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))
    return (pairs if is_interleaved else pairs.transpose(-1, -2)).flatten(-2)
