"""GEMMs with few rows against their reference."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.linear import FEW_TOKENS, gated, linear, reference
from kernels.rms_norm import Norm
from kernels.silu_mul import Act, num_parts

# GEMMs of normal values over up to 520 terms: results are about 20.
FLOAT32: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
# x * norm.weight is rounded to 8 bits before the GEMM, and the result once.
BFLOAT16: dict[str, Any] = {"atol": 0.25, "rtol": 2**-7}
TOLERANCES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def norm_of(size: int, dtype: torch.dtype) -> Norm:
    return Norm(torch.randn(size).to(dtype), 1e-5)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.float(), expected, **TOLERANCES[dtype])


@dtypes
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "size"),
    [(0, 8, 8), (1, 16, 32), (3, 70, 264), (17, 33, 520), (64, 40, 8)],
)
def test_it_is_the_product(
    num_tokens: int, num_rows: int, size: int, has_norm: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(num_tokens, size).to(dtype), torch.randn(num_rows, size).to(dtype)
    norm = norm_of(size, dtype) if has_norm else None
    found = linear(x, weight, norm=norm)
    assert found.dtype == dtype
    assert_near(found, reference.linear(x, weight, norm=norm), dtype)


@dtypes
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_bias_and_residual_are_added(
    has_bias: bool, has_residual: bool, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(5, 64).to(dtype), torch.randn(24, 64).to(dtype)
    bias = torch.randn(24).to(dtype) if has_bias else None
    residual = torch.randn(5, 24).to(dtype) if has_residual else None
    expected = reference.linear(x, weight, bias, residual=residual)
    found = linear(x, weight, bias, residual=residual)
    assert_near(found, expected, dtype)
    assert residual is None or found is residual


def test_large_states_do_not_overflow_in_float16() -> None:
    x, norm = (1e4 * torch.randn(3, 64)).half(), Norm(torch.full((64,), 20.0).half(), 1e-5)
    weight = (0.02 * torch.randn(32, 64)).half()
    tolerance: dict[str, Any] = {"atol": 0.02, "rtol": 2**-9}
    for found, expected in (
        (linear(x, weight, norm=norm), reference.linear(x, weight, norm=norm)),
        (gated(x, weight, norm=norm), reference.gated(x, weight, norm=norm)),
    ):
        torch.testing.assert_close(found.float(), expected, **tolerance)


def test_a_float32_result_is_not_rounded() -> None:
    x, weight = torch.randn(2, 128).bfloat16(), torch.randn(48, 128).bfloat16()
    found = linear(x, weight, out_dtype=torch.float32)
    torch.testing.assert_close(found, reference.linear(x, weight), **FLOAT32)


@pytest.mark.parametrize("num_rows", [2048, 16400])
def test_wider_weights_take_larger_blocks(num_rows: int) -> None:
    x, weight = torch.randn(2, 16), torch.randn(num_rows, 16)
    torch.testing.assert_close(linear(x, weight), reference.linear(x, weight), **FLOAT32)


def test_a_weight_may_be_some_columns_of_another_among_nan() -> None:
    x, whole = torch.randn(4, 24), torch.full((18, 48), torch.nan)
    weight = whole[:, 24:]
    weight.normal_()
    torch.testing.assert_close(linear(x, weight), reference.linear(x, weight), **FLOAT32)


def test_nan_stays_with_its_token() -> None:
    x, weight, norm = torch.randn(6, 40), torch.randn(20, 40), norm_of(40, torch.float32)
    x[2, 7] = torch.nan
    found = linear(x, weight, norm=norm)
    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4, 5]].isfinite().all()


@dtypes
@pytest.mark.parametrize(
    ("act", "has_bias"), [("silu", False), ("gelu_tanh", True), ("relu2", True)]
)
@pytest.mark.parametrize(("num_tokens", "num_gates", "size"), [(1, 8, 32), (4, 37, 72), (33, 9, 8)])
def test_gates_open_for_ups(
    num_tokens: int, num_gates: int, size: int, act: Act, has_bias: bool, dtype: torch.dtype
) -> None:
    """After a norm with a float32 weight."""
    x, norm = torch.randn(num_tokens, size).to(dtype), norm_of(size, torch.float32)
    num_rows = num_parts(act) * num_gates
    weight = (torch.randn(num_rows, size) / size**0.5).to(dtype)
    bias = torch.randn(num_rows).to(dtype) if has_bias else None
    found = gated(x, weight, bias, norm=norm, act=act)
    assert found.shape == (num_tokens, num_gates)
    assert_near(found, reference.gated(x, weight, bias, norm=norm, act=act), dtype)


@dtypes
@pytest.mark.parametrize(("num_rows", "size"), [(24, 272), (72, 272), (200, 40)])
def test_a_tokens_result_is_the_same_bits_whatever_is_beside_it(
    num_rows: int, size: int, dtype: torch.dtype, large_blocks: None
) -> None:
    """In programs of 16 rows, of 32 and of 64."""
    x, weight = torch.randn(FEW_TOKENS, size).to(dtype), torch.randn(num_rows, size).to(dtype)
    norm, residual = norm_of(size, dtype), torch.randn(FEW_TOKENS, num_rows).to(dtype)
    wide = linear(x, weight, residual=residual.clone())
    normed = linear(x, weight, norm=norm)
    gates = gated(x, weight, norm=norm)
    assert_near(wide, reference.linear(x, weight, residual=residual), dtype)
    assert_near(normed, reference.linear(x, weight, norm=norm), dtype)
    for num_tokens in (1, 2, 9, 16, 17, 33):
        few = x[:num_tokens]
        found = linear(few, weight, residual=residual[:num_tokens].clone())
        assert torch.equal(found, wide[:num_tokens]), num_tokens
        assert torch.equal(linear(few, weight, norm=norm), normed[:num_tokens]), num_tokens
        assert torch.equal(gated(few, weight, norm=norm), gates[:num_tokens]), num_tokens


@dtypes
def test_many_tokens_have_another_way(dtype: torch.dtype) -> None:
    num_tokens = FEW_TOKENS + 1
    x, weight, bias = (torch.randn(*size).to(dtype) for size in ((num_tokens, 64), (24, 64), (24,)))
    norm, residual = norm_of(64, dtype), torch.randn(num_tokens, 24).to(dtype)
    terms: dict[str, Any] = {"norm": norm, "residual": residual}
    expected = reference.linear(x, weight, bias, **terms)
    assert_near(linear(x, weight, bias, **terms), expected, dtype)
    small = weight / 8
    assert_near(gated(x, small, norm=norm), reference.gated(x, small, norm=norm), dtype)


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(8, 4).T, torch.ones(2, 8), "x and residual must be contiguous"),
        (torch.ones(1, 12), torch.ones(2, 12), "a multiple of 8"),
        (torch.ones(1, 16), torch.ones(2, 8), "must share their last size"),
        (torch.ones(1, 8), torch.ones(8, 8).T, "rows must be contiguous"),
    ],
)
def test_shapes_and_dtypes_it_cannot_multiply_are_an_error(
    x: Tensor, weight: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        linear(x, weight)
