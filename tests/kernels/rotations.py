"""What ``rope_kv`` makes of random heads."""

from typing import Any

import torch
from torch import Tensor

from kernels.rope_kv import reference, rope_kv

EPS = 1e-6
NUM_POSITIONS = 50
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
    has_norm: bool = True,
    is_interleaved: bool = False,
    device: torch.device = CPU,
) -> None:
    """Asserts that queries and caches agree."""
    heads = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    query_norm, key_norm = (
        torch.rand(head_dim).to(dtype) + 0.5 if has_norm else None for _ in range(2)
    )
    table = rotation_table(NUM_POSITIONS, head_dim, is_interleaved)
    positions = torch.randint(0, NUM_POSITIONS, (num_tokens,))
    slot_mapping = torch.randperm(NUM_KV_SLOTS)[:num_tokens]
    expected_cache = torch.randn(NUM_KV_SLOTS // 4, 4, 2, num_kv_heads, head_dim).to(dtype)
    cache = expected_cache.clone()
    arguments = (heads, query_norm, key_norm, EPS, table, positions, slot_mapping)
    expected = reference.rope_kv(*arguments, expected_cache, is_interleaved)
    cache = cache.to(device)
    moved: Any = [part.to(device) if isinstance(part, Tensor) else part for part in arguments]
    moved += [cache, is_interleaved]
    actual = rope_kv(*moved)
    close: dict[str, Any] = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(actual.cpu(), expected, **close)
    torch.testing.assert_close(cache.cpu(), expected_cache, **close)


def rotation_table(num_positions: int, head_dim: int, is_interleaved: bool) -> Tensor:
    """Cosines and signed sines of random angles: [2, num_positions, head_dim] float32."""
    angles = torch.randn(num_positions, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))
    return (pairs if is_interleaved else pairs.transpose(-1, -2)).flatten(-2)
