"""GEMMs with quantized weights, against dequantized ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.codes import Codes, decoded, decoded_rows
from kernels.linear import FEW_TOKENS, gated, linear
from kernels.rms_norm import Norm, reference
from tests.kernels.coded import KINDS, random_codes
from tests.selection import every_pair

# Relative to the largest result. The result is rounded, and in some paths the dequantized weights
# are.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
kinds = pytest.mark.parametrize("kind", KINDS)
GROUPS = [16, 32, 48, 64, 96, 128, None]


def exactly(
    x: Tensor,
    weight: Codes,
    bias: Tensor | None = None,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """All in float64, [T, N]."""
    wide = x.double()
    if norm is not None:
        wide = reference.rms_norm(x.float(), *norm).double()
    out = wide @ weight.values(torch.float32).double().T
    for term in (bias, residual):
        out = out if term is None else out + term.double()
    return out


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    off = (found.double() - expected).abs().max()
    assert off <= TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros", "dtype"),
    every_pair(KINDS, GROUPS, [False, True], [*TOLERANCES]),
)
def test_it_is_the_product_with_the_dequantized_weight(
    kind: str, group: int | None, has_zeros: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Outputs and inputs do not fill the last block."""
    weight = random_codes(kind, (37, 288), group, zeros=has_zeros, device=device)
    x = torch.randn(3, 288, device=device).to(dtype)
    assert_near(linear(x, weight), exactly(x, weight), dtype)


@pytest.mark.parametrize(
    ("kind", "sizes", "terms"),
    every_pair(
        KINDS,
        [(0, (8, 16)), (1, (16, 64)), (17, (70, 272)), (64, (33, 144))],
        ["bias", "norm", "residual", "all, ordered"],
    ),
)
def test_norm_bias_and_residual_are_added(
    kind: str, sizes: tuple[int, tuple[int, int]], terms: str, device: torch.device
) -> None:
    num_tokens, shape = sizes
    dtype = torch.float16 if terms == "bias" else torch.bfloat16
    num_rows, size = shape

    def normals(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    weight = random_codes(kind, shape, 16, order="ordered" in terms, device=device)
    x, norm = normals(num_tokens, size), Norm(normals(size), 1e-5)
    given: dict[str, Any] = {"bias": normals(num_rows), "norm": norm}
    given["residual"] = normals(num_tokens, num_rows)
    given = {name: each for name, each in given.items() if name in terms or "all" in terms}
    expected = exactly(x, weight, **given)
    found = linear(x, weight, **given)
    assert found.shape == (num_tokens, num_rows)
    # The normed x is rounded once more, and so is the GEMM without Triton.
    torch.testing.assert_close(found.double(), expected, atol=0.3, rtol=2**-6)


@pytest.mark.parametrize("kind", ["int8", "fp8", "counted"])  # exact in bfloat16
def test_a_float32_result_is_not_rounded(kind: str, triton_device: torch.device) -> None:
    x = torch.randn(2, 128, device=triton_device).bfloat16()
    weight = random_codes(kind, (48, 128), device=triton_device)
    found = linear(x, weight, out_dtype=torch.float32)
    assert_near(found, exactly(x, weight), torch.float32)


@pytest.mark.parametrize(
    ("kind", "group", "num_tokens"), every_pair(KINDS, [32, None], [1, 33, 70])
)
def test_gates_open_for_ups(
    kind: str, group: int | None, num_tokens: int, device: torch.device
) -> None:
    weight = random_codes(kind, (74, 288), group, order=num_tokens == 33, device=device)
    weight = weight._replace(scales=weight.scales / 16)
    x, norm_weight, bias = (
        torch.randn(shape, device=device).bfloat16() for shape in ((num_tokens, 288), 288, 74)
    )
    norm = Norm(norm_weight, 1e-5)
    gates, ups = exactly(x, weight, bias, norm).split(37, 1)
    found = gated(x, weight, bias, norm=norm)
    torch.testing.assert_close(found.double(), functional.silu(gates) * ups, atol=0.1, rtol=2**-5)


@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("num_rows", [24, 72, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tokens_result_is_the_same_bits_whatever_is_beside_it(
    kind: str,
    num_rows: int,
    group: int | None,
    triton_device: torch.device,
    large_blocks: None,
) -> None:
    """In blocks of 16, 32 and 64 rows, of 16 to 64 tokens."""
    weight = random_codes(kind, (num_rows, 288), group, zeros=True, device=triton_device)
    x, norm_weight, residual = (
        torch.randn(shape, device=triton_device).bfloat16()
        for shape in ((FEW_TOKENS, 288), 288, (FEW_TOKENS, num_rows))
    )
    norm = Norm(norm_weight, 1e-5)
    operators: list[Callable[[int], Tensor]] = [
        lambda num: linear(x[:num], weight, norm=norm, residual=residual[:num].clone()),
        lambda num: gated(x[:num], weight, norm=norm),
    ]
    for operator in operators:
        wide = operator(FEW_TOKENS)
        for num_tokens in (1, 9, 17, 33):
            assert torch.equal(operator(num_tokens), wide[:num_tokens]), num_tokens


@pytest.mark.parametrize(
    ("kind", "group", "has_zeros", "dtype"),
    every_pair(KINDS, [*GROUPS, 24], [False, True], [*TOLERANCES]),
)
def test_decoded_weights_are_their_values_to_the_bit(
    kind: str, group: int | None, has_zeros: bool, dtype: torch.dtype, device: torch.device
) -> None:
    weight = random_codes(kind, (37, 288), group, zeros=has_zeros, device=device)
    assert torch.equal(decoded(weight, dtype), weight.values(dtype))


@kinds
@pytest.mark.parametrize(
    ("group", "terms"), [(16, "zeros"), (24, "zeros"), (128, "order"), (None, "")]
)
def test_decoded_rows_match_all_values_to_the_bit(
    kind: str, group: int | None, terms: str, device: torch.device
) -> None:
    given = {"zeros": terms == "zeros", "order": terms == "order"}
    weight = random_codes(kind, (37, 288), group, **given, device=device)
    ids = torch.tensor([36, 0, 5, 5, *range(20)], device=device)
    for dtype, kept in ((torch.bfloat16, ids), (torch.float32, ids[:1].int())):
        found = decoded_rows(weight, kept, dtype)
        assert torch.equal(found, weight.values(dtype)[kept.long()])


@kinds
@pytest.mark.parametrize("has_order", [False, True])
def test_many_tokens_are_multiplied_with_decoded_weights(
    kind: str, has_order: bool, device: torch.device
) -> None:
    weight = random_codes(kind, (24, 160), 32, zeros=True, order=has_order, device=device)
    for dtype in TOLERANCES:
        x, residual = (
            torch.randn(FEW_TOKENS + 1, num, device=device).to(dtype) for num in (160, 24)
        )
        expected = exactly(x, weight, residual=residual)
        # The GEMM is rounded before the residual is added.
        off = (linear(x, weight, residual=residual).double() - expected).abs().max()
        assert off <= 2 * TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize(("size", "group"), [(288, 24), (72, None), (50, 25)])
def test_codes_without_kernels_are_torchs(
    size: int, group: int | None, device: torch.device
) -> None:
    x = torch.randn(2, size, device=device)
    for kind in KINDS:
        weight = random_codes(kind, (20, size), group, order=True, device=device)
        assert_near(linear(x, weight), exactly(x, weight), torch.float32)


def test_nan_stays_with_its_token(device: torch.device) -> None:
    x, weight = torch.randn(6, 48, device=device), random_codes("fp8", (20, 48), 16, device=device)
    x[2, 7] = torch.nan
    found = linear(x, weight)
    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4, 5]].isfinite().all()


def test_unreadable_tensors_are_errors(triton_device: torch.device) -> None:
    x, weight = torch.ones(1, 32, device=triton_device), random_codes("int8", (8, 64))
    with pytest.raises(ValueError, match="must share their last size"):
        linear(x, weight)
    weight = weight._replace(codes=weight.codes[:, :32], inputs=32)
    with pytest.raises(ValueError, match="codes, scales and zeros must be contiguous"):
        linear(x, weight)
