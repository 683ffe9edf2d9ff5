"""kv_write against its reference."""

import pytest
import torch

from kernels.kv_codes import HIGHEST_CODE, dequantize
from kernels.kv_write import kv_write, reference
from tests.kernels.strided import apart


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_go_to_their_slot_mapping_and_nothing_else_changes(
    num_tokens: int, dtype: torch.dtype
) -> None:
    cache = apart(torch.randn(6, 4, 2, 3, 8).to(dtype))
    # keys and values as attention has them: slices of one GEMM's output
    heads = torch.randn(num_tokens, 10, 8).to(dtype)
    slot_mapping = torch.randperm(24)[:num_tokens]
    expected = cache.clone()
    reference.kv_write(expected, heads[:, 4:7], heads[:, 7:], slot_mapping)
    kv_write(cache, heads[:, 4:7], heads[:, 7:], slot_mapping)
    torch.testing.assert_close(cache, expected, atol=0, rtol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 13])
@pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)
def test_codes_have_scales(num_tokens: int, codes: torch.dtype) -> None:
    """Values may be smaller than keys."""
    cache = apart(torch.randint(0, 100, (6, 4, 2, 3, 8)).to(codes))
    scales = apart(torch.randn(6, 4, 2, 3))
    key, value = torch.randn(num_tokens, 3, 8), torch.randn(num_tokens, 3, 6)
    slot_mapping = torch.randperm(24)[:num_tokens]
    expected, expected_scales = cache.clone(), scales.clone()
    reference.kv_write(expected, key, value, slot_mapping, expected_scales)
    kv_write(cache, key, value, slot_mapping, scales)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=0)
    numbers, wanted = (dequantize(each, scales, torch.float32) for each in (cache, expected))
    torch.testing.assert_close(numbers, wanted, atol=0, rtol=0)
