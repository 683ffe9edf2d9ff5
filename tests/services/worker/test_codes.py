"""Whole numbers and scales stand for nearly the numbers that they were made from."""

import pytest
import torch

from kernels.cpu.library import load_library, variants
from kernels.cpu.program import NativeLibrary
from services.worker.layers.weights import GROUP, MAX_CODE, Int4, Int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_is_off_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(33, 50, generator=generator)
    values[3] = 0.0
    values[4] *= 1e-6
    values[5] *= 1e6
    values = values.to(dtype)
    form = Int8(values)
    assert form.codes.dtype == torch.int8
    assert form.codes.abs().amax(1).tolist() == [0 if row == 3 else MAX_CODE for row in range(33)]
    rounding = values.float().abs() * (2**-8 if dtype == torch.bfloat16 else 0)
    off = (form.values.float() - values.float()).abs()
    assert (off <= form.scales[:, None] * 0.501 + rounding).all()
    assert form.values.dtype == dtype


@pytest.mark.parametrize("inputs", [64, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int4_is_off_by_half_a_scale_where_codes_reach(dtype: torch.dtype, inputs: int) -> None:
    """They reach from −8 to 7 scales. No group loses more squares than with its farthest number at
    −8 of them."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(33, inputs, generator=generator)
    values[3] = 0.0
    values[4] *= 1e-6
    values[5] *= 1e6
    values = values.to(dtype)
    form = Int4(values)
    assert form.codes.shape == (33, 2 * GROUP // 2)
    assert form.scales.shape == (33, 2)
    assert form.values.dtype == dtype
    found, wanted = form.values.float(), values.float()
    scales = form.scales.float().repeat_interleave(GROUP, 1)[:, :inputs]
    ratios = wanted / torch.where(scales == 0, 1, scales)
    is_reached = (ratios > -8.5) & (ratios < 7.5)
    rounding = wanted.abs() * (2**-8 if dtype == torch.bfloat16 else 0)
    assert ((found - wanted).abs() <= 0.501 * scales.abs() + rounding)[is_reached].all()
    assert is_reached.float().mean() > 0.9
    assert (found[3] == 0).all()
    for start in range(0, inputs, GROUP):
        group, got = wanted[:, start : start + GROUP], found[:, start : start + GROUP]
        farthest = group.gather(1, group.abs().argmax(1, keepdim=True))
        plain = (farthest / -8).bfloat16().float()
        plain[plain == 0] = 1
        plain_errors = (group / plain).round().clamp(-8, 7) * plain - group
        slack = rounding[:, start : start + GROUP].square().sum(1)
        errors = (got - group).square().sum(1)
        assert (errors <= plain_errors.square().sum(1) * 1.05 + slack).all()
        assert errors[6:].sum() < plain_errors[6:].square().sum()


def test_int4_finds_whole_numbers_again() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (7, 96), generator=generator)
    codes[:, ::GROUP] = -8
    for scale in (0.25, -3.0):
        form = Int4(codes * scale)
        assert torch.equal(form.values, codes * scale)
        assert (form.scales == scale).all()


@pytest.mark.parametrize(
    ("inputs", "num_groups", "num_bytes", "why"),
    [
        (36, 2, 32, "36 inputs in 2 groups of 32, or no multiple of 8"),
        (64, 3, 48, "64 inputs in 3 groups of 32, or no multiple of 8"),
        (64, 2, 16, r"codes \[5, 16\] for 5 outputs with 2 groups"),
    ],
)
def test_codes_of_other_groups_are_not_packed(
    inputs: int, num_groups: int, num_bytes: int, why: str
) -> None:
    library = NativeLibrary(load_library(variants()[0]), torch.float32, 1)
    codes = torch.zeros(5, num_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=why):
        library.pack_int4(codes, torch.ones(5, num_groups, dtype=torch.bfloat16), inputs)
