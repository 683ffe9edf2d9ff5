"""Codes of keys and values against their reference."""

import pytest
import torch
from torch import Tensor

from kernels.kv_codes import HIGHEST_CODE, dequantize, quantize, reference
from kernels.kv_codes.gather import gather
from kernels.kv_codes.latents import (
    GROUP,
    dequantize_latents,
    entry_size,
    num_groups,
    quantize_latents,
)

codes = pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)


def numbers(dtype: torch.dtype) -> Tensor:
    """[7, 48]: any magnitude, some indistinguishable from 0 as codes, one row all 0."""
    x = torch.randn(7, 48) * torch.tensor([1e-30, 1e-3, 1.0, 1.0, 1e3, 1e30, 0.0])[:, None]
    x[3] *= torch.logspace(-6, 0, 48)
    return x.to(dtype)


@codes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_number_gets_the_nearest_code(codes: torch.dtype, dtype: torch.dtype) -> None:
    x = numbers(dtype)
    expected, expected_scales = reference.quantize(x, codes)
    found, scales = quantize(x, codes)
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=0)
    # −0 has its own byte in an 8-bit float
    torch.testing.assert_close(value_of(found), value_of(expected), atol=0, rtol=0)


def value_of(codes: Tensor) -> Tensor:
    return dequantize(codes, torch.ones(codes.shape[:-1]), torch.float32)


@codes
def test_ties_go_to_the_even_code(codes: torch.dtype) -> None:
    halves = torch.tensor([0.5, 1.5, 2.5, -3.5])
    if codes == torch.uint8:  # halfway between three-bit neighbours, and the smallest value
        halves = torch.tensor([17.0, 19.0, -2.125, 0.5 / 512])
    x = torch.cat((torch.tensor([HIGHEST_CODE[codes]]), halves))[None]
    found, scales = quantize(x, codes)
    assert scales.tolist() == [1.0]
    assert torch.equal(value_of(found), value_of(reference.quantize(x, codes)[0]))
    expected = [0, 2, 2, -4] if codes == torch.int8 else [16, 20, -2, 0]
    assert value_of(found)[0, 1:].tolist() == expected


@codes
def test_dequantized_numbers_are_near(codes: torch.dtype) -> None:
    x = numbers(torch.float32)
    found, scales = quantize(x, codes)
    error = (dequantize(found, scales, torch.float32) - x).abs()
    if codes == torch.int8:
        allowed = scales[:, None].expand_as(x) / 2
    else:
        allowed = torch.maximum(x.abs() / 16, scales[:, None] / 1024)
    assert (error <= allowed * 1.001).all()


@codes
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_spoils_its_head_alone(codes: torch.dtype, bad: float) -> None:
    x = torch.randn(3, 16)
    x[1, 5] = bad
    found = dequantize(*quantize(x, codes), torch.float32)
    assert found.isfinite().all(1).tolist() == [True, False, True]


@codes
def test_blocks_are_gathered_as_numbers(codes: torch.dtype) -> None:
    x = torch.randn(5, 4, 2, 3, 8)
    found, scales = quantize(x, codes)
    blocks = torch.tensor([3, 0, 3])
    expected = dequantize(found, scales, torch.bfloat16)[blocks]
    assert torch.equal(gather(found, scales, blocks, torch.bfloat16), expected)
    assert torch.equal(gather(x, None, blocks, torch.float32), x[blocks])


@codes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [48, 128, 320])
def test_groups_of_a_latent_have_scales_and_its_key_stays_as_it_is(
    rank: int, dtype: torch.dtype, codes: torch.dtype
) -> None:
    """The last group may be smaller; magnitudes differ by group."""
    sizes = torch.logspace(-2, 2, num_groups(rank)).repeat_interleave(GROUP)[:rank]
    latents = (torch.randn(5, rank) * sizes).to(dtype)
    entries = torch.cat((latents, torch.randn(5, 16).to(dtype)), 1)
    stored, scales = quantize_latents(entries, rank, codes)
    assert (stored.dtype, stored.shape) == (codes, (5, entry_size(rank, 16, dtype)))
    found = dequantize_latents(stored, scales, rank, dtype)
    parts = [dequantize(*quantize(each, codes), dtype) for each in latents.split(GROUP, 1)]
    assert torch.equal(found, torch.cat((*parts, entries[:, rank:]), 1))
    blocks = torch.tensor([2, 0])
    cache, of_cache = stored[:, None, None, None], scales[:, None, None, None]
    assert torch.equal(gather(cache, of_cache, blocks, dtype, rank).flatten(1), found[blocks])
