"""``rope_kv`` of random heads."""

from typing import Any, Literal

import torch
from torch import Tensor

from kernels.kv_codes import dequantize, quantize
from kernels.rms_norm import Norm
from kernels.rope_kv import reference, rope_kv
from tests.kernels.strided import apart

EPS = 1e-6
NUM_KV_SLOTS = 24
# Multiplications are rounded in another order: a bfloat16 may become its neighbour.
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
    codes: torch.dtype | None = None,
    rotary_dim: int | None = None,
) -> None:
    """Asserts that queries and caches agree. If the cache has ``codes``, an element may get a
    neighbouring code. ``rotary_dim`` elements of a head are rotated, or all."""
    heads = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    nums = {"none": (), "heads": (1, 1), "tokens": (num_heads, num_kv_heads)}[norm]
    weights = [torch.rand(num * head_dim).to(dtype) + 0.5 for num in nums]
    rotation = rotation_table(num_tokens, rotary_dim or head_dim, is_interleaved)
    slot_mapping = torch.randperm(NUM_KV_SLOTS)[:num_tokens]
    expected_cache = torch.randn(NUM_KV_SLOTS // 4, 4, 2, num_kv_heads, head_dim).to(dtype)
    expected_scales = None
    if codes is not None:
        expected_cache, expected_scales = quantize(expected_cache, codes)
    cache = apart(expected_cache.to(device))
    scales = None if expected_scales is None else apart(expected_scales.to(device))
    expected = reference.rope_kv(
        heads,
        *_norms(weights),
        rotation,
        slot_mapping,
        expected_cache,
        is_interleaved,
        expected_scales,
    )
    heads, rotation, slot_mapping, *weights = (
        each.to(device) for each in (heads, rotation, slot_mapping, *weights)
    )
    actual = rope_kv(heads, *_norms(weights), rotation, slot_mapping, cache, is_interleaved, scales)
    close: dict[str, Any] = {"atol": TOLERANCES[dtype], "rtol": TOLERANCES[dtype]}
    torch.testing.assert_close(actual.cpu(), expected, **close)
    if scales is None or expected_scales is None:
        torch.testing.assert_close(cache.cpu(), expected_cache, **close)
        return
    torch.testing.assert_close(scales.cpu(), expected_scales, **close)
    found, wanted = (
        dequantize(each, expected_scales, torch.float32) for each in (cache.cpu(), expected_cache)
    )
    step = expected_scales[..., None] if codes == torch.int8 else wanted.abs() / 8
    assert ((found - wanted).abs() <= step * 1.001 + TOLERANCES[dtype]).all()
    assert (found != wanted).float().mean() <= (0.005 if dtype == torch.float32 else 0.05)


def _norms(weights: list[Tensor]) -> tuple[Norm | None, Norm | None]:
    """Of queries and keys."""
    query, key = weights or (None, None)
    return query if query is None else Norm(query, EPS), key if key is None else Norm(key, EPS)


def rotation_table(num_positions: int, size: int, is_interleaved: bool) -> Tensor:
    """Cosines and signed sines of random angles: [2, num_positions, size] float32."""
    angles = torch.randn(num_positions, size // 2)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))
    return (pairs if is_interleaved else pairs.transpose(-1, -2)).flatten(-2)
