"""GEMMs, and the gates of a feed-forward network, against their references."""

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kernels.linear import FEW_TOKENS, gated, linear, reference
from kernels.rms_norm import Norm
from kernels.silu_mul import Act

# GEMMs of normal values over 264 terms: results are about 16. bfloat16 rounds the normed x, and the
# GEMM before the bias.
FLOAT32: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
BFLOAT16: dict[str, Any] = {"atol": 0.25, "rtol": 2**-6}
# For results of about 1; few-row kernels round nothing before the sum.
ON_GPU: Any = {torch.float32: FLOAT32, torch.bfloat16: {"atol": 0.03, "rtol": 2**-7}}
TOLERANCES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


def normals(*shapes: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(*shape, device=device).to(dtype) for shape in shapes]


@dtypes
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 100])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_it_is_the_product(
    num_tokens: int, has_norm: bool, has_bias: bool, has_residual: bool, dtype: torch.dtype
) -> None:
    x, weight, norm_weight = normals((num_tokens, 264), (70, 264), (264,), dtype=dtype)
    bias, residual = normals((70,), (num_tokens, 70), dtype=dtype)
    terms: dict[str, Any] = {
        "bias": bias if has_bias else None,
        "norm": Norm(norm_weight, 1e-5) if has_norm else None,
        "residual": residual if has_residual else None,
    }
    expected = reference.linear(x, weight, **terms)
    found = linear(x, weight, **terms)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("num_tokens", [5, FEW_TOKENS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_residual_is_added_to_in_place(
    has_bias: bool, num_tokens: int, device: torch.device
) -> None:
    shapes = ((num_tokens, 64), (40, 64), (40,), (num_tokens, 40))
    x, weight, bias, residual = normals(*shapes, dtype=torch.float32, device=str(device))
    terms: dict[str, Any] = {"bias": bias if has_bias else None, "residual": residual}
    expected = reference.linear(x, weight, **terms)
    assert linear(x, weight, **terms) is residual
    torch.testing.assert_close(residual, expected, **FLOAT32)


def test_a_float32_result_is_not_rounded() -> None:
    x, weight, bias = normals((3, 64), (40, 64), (40,), dtype=torch.bfloat16)
    found = linear(x, weight, bias, out_dtype=torch.float32)
    torch.testing.assert_close(found, reference.linear(x, weight, bias), **FLOAT32)


@dtypes
@pytest.mark.parametrize("act", get_args(Act))
def test_gates_open_for_ups(act: Act, dtype: torch.dtype) -> None:
    """After a norm with a float32 weight."""
    x, weight, bias = normals((4, 72), (74, 72), (74,), dtype=dtype)
    weight /= 8
    norm = Norm(torch.randn(72), 1e-5)
    expected = reference.gated(x, weight, bias, norm=norm, act=act)
    found = gated(x, weight, bias, norm=norm, act=act)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, **TOLERANCES[dtype])


@pytest.mark.gpu
@dtypes
@pytest.mark.parametrize(("num_rows", "size"), [(512, 256), (4096, 12288), (24576, 4096)])
def test_a_tokens_result_is_the_same_bits_whatever_is_beside_it(
    num_rows: int, size: int, dtype: torch.dtype
) -> None:
    shapes = ((FEW_TOKENS, size), (num_rows, size), (size,), (FEW_TOKENS, num_rows))
    x, weight, norm_weight, residual = normals(*shapes, dtype=dtype, device="cuda")
    norm = Norm(norm_weight, 1e-6)
    weight /= size**0.5
    expected = reference.linear(x, weight, norm=norm, residual=residual)
    wide = linear(x, weight, norm=norm, residual=residual.clone())
    torch.testing.assert_close(wide.float(), expected, **ON_GPU[dtype])
    gates = gated(x, weight, norm=norm)
    for num_tokens in (1, 2, 8, 16, 17, 32, 33, 63):
        few = x[:num_tokens]
        found = linear(few, weight, norm=norm, residual=residual[:num_tokens].clone())
        assert torch.equal(found, wide[:num_tokens]), num_tokens
        assert torch.equal(gated(few, weight, norm=norm), gates[:num_tokens]), num_tokens
