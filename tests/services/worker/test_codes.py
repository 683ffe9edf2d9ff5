"""Integers and scales approximate the original weights."""

import pytest
import torch

from kernels.codes import Codes
from kernels.cpu.library import load_library, variants
from kernels.cpu.packing import NativeLibrary
from services.worker.layers.weights import Quantized, are_alike, joined
from services.worker.weights.online import (
    FP8_BLOCK,
    INT4_GROUP,
    MAX_FP8,
    MAX_INT8,
    NF4_GROUP,
    quantize_fp8,
    quantize_fp8_block,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_is_off_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(33, 50, generator=generator)
    values[3] = 0.0
    values[4] *= 1e-6
    values[5] *= 1e6
    values = values.to(dtype)
    form = quantize_int8(values)
    assert form.codes.dtype == torch.int8
    assert form.codes.abs().amax(1).tolist() == [0 if row == 3 else MAX_INT8 for row in range(33)]
    rounding = values.float().abs() * (2**-8 if dtype == torch.bfloat16 else 0)
    off = (form.values.float() - values.float()).abs()
    assert (off <= form.scales * 0.501 + rounding).all()
    assert form.values.dtype == dtype


@pytest.mark.parametrize("inputs", [64, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int4_is_off_by_half_a_scale_where_codes_reach(dtype: torch.dtype, inputs: int) -> None:
    """Codes reach from −8 to 7 scales. No group has a larger squared error than with its largest
    element at −8."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(33, inputs, generator=generator)
    values[3] = 0.0
    values[4] *= 1e-6
    values[5] *= 1e6
    values = values.to(dtype)
    form = quantize_int4(values)
    assert form.codes.shape == (33, inputs // 2)
    assert form.scales.shape == (33, 2)
    assert form.values.dtype == dtype
    found, wanted = form.values.float(), values.float()
    scales = form.scales.float().repeat_interleave(INT4_GROUP, 1)[:, :inputs]
    ratios = wanted / torch.where(scales == 0, 1, scales)
    is_reached = (ratios > -8.5) & (ratios < 7.5)
    rounding = wanted.abs() * (2**-8 if dtype == torch.bfloat16 else 0)
    assert ((found - wanted).abs() <= 0.501 * scales.abs() + rounding)[is_reached].all()
    assert is_reached.float().mean() > 0.9
    assert (found[3] == 0).all()
    for start in range(0, inputs, INT4_GROUP):
        group, got = wanted[:, start : start + INT4_GROUP], found[:, start : start + INT4_GROUP]
        farthest = group.gather(1, group.abs().argmax(1, keepdim=True))
        plain = (farthest / -8).bfloat16().float()
        plain[plain == 0] = 1
        plain_errors = (group / plain).round().clamp(-8, 7) * plain - group
        slack = rounding[:, start : start + INT4_GROUP].square().sum(1)
        errors = (got - group).square().sum(1)
        assert (errors <= plain_errors.square().sum(1) * 1.05 + slack).all()
        assert errors[6:].sum() < plain_errors[6:].square().sum()


def test_int4_finds_whole_numbers_again() -> None:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (7, 96), generator=generator)
    codes[:, ::INT4_GROUP] = -8
    for scale in (0.25, -3.0):
        form = quantize_int4(codes * scale)
        assert torch.equal(form.values, codes * scale)
        assert (form.scales == scale).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nf4_takes_the_nearest_of_its_numbers(dtype: torch.dtype) -> None:
    values = torch.randn(33, 150, generator=torch.Generator().manual_seed(1))
    values[3] = 0.0
    form = quantize_nf4(values.to(dtype))
    assert form.scales.shape == (33, 3)
    assert form.table is not None
    assert (form.values[3] == 0).all()
    form.dtype = torch.float32
    scales = form.scales.float().repeat_interleave(NF4_GROUP, 1)[:, :150]
    choices = scales[..., None] * form.table
    wanted = values.to(dtype).float()
    nearest = (choices - wanted[..., None]).abs().amin(2)
    assert torch.allclose((form.values - wanted).abs(), nearest, atol=1e-6)


@pytest.mark.parametrize("outputs", [256, 200])
def test_fp8_is_off_by_a_sixteenth_at_most(outputs: int) -> None:
    """Of an element, or by half of the smallest step of a scale."""
    values = torch.randn(outputs, 300, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-6, 3, 300)
    for quantize in (quantize_fp8, quantize_fp8_block):
        form = quantize(values)
        assert form.codes.dtype == torch.float8_e4m3fn
        scales = form.scales.float().repeat_interleave(form.group, 1)[:, :300]
        off = (form.values - values).abs()
        assert (off <= (values.abs() / 16).maximum(scales * 2**-10) * 1.001).all()
        assert form.codes.float().abs().amax() == MAX_FP8


def test_fp8_blocks_share_a_scale() -> None:
    values = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    scales = quantize_fp8_block(values).scales
    assert scales.shape == (200, 3)
    for rows in (slice(0, FP8_BLOCK), slice(FP8_BLOCK, 200)):
        for column in range(3):
            block = values[rows, column * FP8_BLOCK : (column + 1) * FP8_BLOCK]
            assert (scales[rows, column] == block.abs().max() / MAX_FP8).all()


def with_zeros(outputs: int, inputs: int, group: int) -> Quantized:
    generator = torch.Generator().manual_seed(outputs)
    num_groups = -(-inputs // group)
    return Quantized(
        torch.randint(-128, 128, (outputs, inputs), generator=generator).to(torch.int8),
        torch.rand(outputs, num_groups, generator=generator) + 0.1,
        dtype=torch.float32,
        inputs=inputs,
        group=group,
        zeros=torch.randint(-9, 9, (outputs, num_groups), generator=generator),
    )


def test_a_part_of_codes_stands_for_a_part_of_the_numbers() -> None:
    for form in (with_zeros(24, 96, 32), quantize_int4(torch.randn(24, 96))):
        for dim, start, num in ((0, 3, 10), (1, 32, 64), (1, 64, 32), (0, 0, 24)):
            part = form.part(dim, start, num)
            assert part is not None
            assert torch.equal(part.values, form.values.narrow(dim, start, num))
        assert form.part(1, 16, 32) is None
        assert form.part(1, 32, 20) is None


def test_codes_of_one_kind_are_joined() -> None:
    forms = [with_zeros(24, 96, 32), with_zeros(7, 96, 32)]
    plain = with_zeros(5, 96, 32)
    plain.zeros = None
    both = joined([*forms, plain])
    assert torch.equal(both.values, torch.cat([*(each.values for each in forms), plain.values]))
    assert are_alike([*forms, plain])
    assert not are_alike([forms[0], with_zeros(7, 96, 48)])
    assert not are_alike([quantize_int4(torch.randn(8, 96)), quantize_nf4(torch.randn(8, 96))])


@pytest.mark.parametrize(
    ("inputs", "group", "why"),
    [
        (36, 36, "36 inputs are no multiple of 16"),
        (64, 24, "groups of 24 inputs are no multiple of 16"),
    ],
)
def test_codes_of_other_groups_are_not_packed(inputs: int, group: int, why: str) -> None:
    library = NativeLibrary(load_library(variants()[0]), torch.float32, 1)
    codes = torch.zeros(5, inputs, dtype=torch.int8)
    with pytest.raises(ValueError, match=why):
        library.pack_codes(Codes(codes, torch.ones(5, 2), None, None, inputs, group))


def test_shapes_that_do_not_go_together_are_refused() -> None:
    codes = torch.zeros(5, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scales \[5, 3\] for 5 outputs with 2 groups"):
        Quantized(codes, torch.ones(5, 3), dtype=torch.float32, inputs=64, group=32)
    with pytest.raises(ValueError, match=r"codes \[5, 64\] for 60 inputs"):
        Quantized(codes, torch.ones(5, 2), dtype=torch.float32, inputs=60, group=32)
