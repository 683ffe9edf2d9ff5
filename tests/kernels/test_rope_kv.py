"""rope_kv in torch against its reference."""

import pytest
import torch

from kernels.rope_kv import reference, rope_kv
from tests.kernels.rotations import rotation_table

NUM_POSITIONS = 20
TOLERANCE = 1e-6


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_torch_agrees(has_norm: bool, is_interleaved: bool, num_tokens: int) -> None:
    heads = torch.randn(num_tokens, (4 + 2 * 2) * 16)
    norms = [torch.rand(16) + 0.5 if has_norm else None for _ in range(2)]
    table = rotation_table(NUM_POSITIONS, 16, is_interleaved)
    positions = torch.randint(0, NUM_POSITIONS, (num_tokens,))
    places = torch.randperm(12)[:num_tokens]
    expected_cache = torch.randn(3, 4, 2, 2, 16)
    cache = expected_cache.clone()
    arguments = (heads, *norms, 1e-6, table, positions, places)
    expected = reference.rope_kv(*arguments, expected_cache, is_interleaved)
    actual = rope_kv(*arguments, cache, is_interleaved)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(cache, expected_cache, atol=TOLERANCE, rtol=TOLERANCE)
