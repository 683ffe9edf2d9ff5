"""Products with weights in codes, against what these stand for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.codes import Codes, decoded
from kernels.linear import MAX_FEW_ROWS, gated, linear
from kernels.linear import triton as launches
from kernels.rms_norm import Norm, reference
from tests.kernels.coded import KINDS, random_codes

# Of a result's own scale, which is some 16: the result is rounded once, and codes of a table, or
# with scales in the product, to the type of the tokens.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
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


@dtypes
@kinds
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("has_zeros", [False, True])
def test_it_is_the_product_with_what_the_codes_stand_for(
    kind: str, group: int | None, has_zeros: bool, dtype: torch.dtype
) -> None:
    """Outputs and inputs fill no last block."""
    weight = random_codes(kind, (37, 288), group, zeros=has_zeros)
    x = torch.randn(3, 288).to(dtype)
    assert_near(linear(x, weight), exactly(x, weight), dtype)


@kinds
@pytest.mark.parametrize(
    ("num_tokens", "shape"), [(0, (8, 16)), (1, (16, 64)), (17, (70, 272)), (64, (33, 144))]
)
@pytest.mark.parametrize("terms", ["bias", "norm", "residual", "all, ordered"])
def test_norm_bias_and_residual_are_added(
    num_tokens: int, shape: tuple[int, int], kind: str, terms: str
) -> None:
    dtype = torch.float16 if terms == "bias" else torch.bfloat16
    num_rows, size = shape
    weight = random_codes(kind, shape, 16, order="ordered" in terms)
    x, norm = torch.randn(num_tokens, size).to(dtype), Norm(torch.randn(size).to(dtype), 1e-5)
    given: dict[str, Any] = {"bias": torch.randn(num_rows).to(dtype), "norm": norm}
    given["residual"] = torch.randn(num_tokens, num_rows).to(dtype)
    given = {name: each for name, each in given.items() if name in terms or "all" in terms}
    found = linear(x, weight, **given)
    assert found.shape == (num_tokens, num_rows)
    if num_tokens:
        # The normed x is rounded once more.
        torch.testing.assert_close(
            found.double(), exactly(x, weight, **given), atol=0.25, rtol=2**-6
        )


@pytest.mark.parametrize("kind", ["int8", "fp8", "counted"])  # are exact in bfloat16
def test_a_float32_result_is_not_rounded(kind: str) -> None:
    x, weight = torch.randn(2, 128).bfloat16(), random_codes(kind, (48, 128), None)
    found = linear(x, weight, out_dtype=torch.float32)
    assert_near(found, exactly(x, weight), torch.float32)


@kinds
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("num_tokens", [1, 33, 70])
def test_gates_open_for_ups(kind: str, group: int | None, num_tokens: int) -> None:
    weight = random_codes(kind, (74, 288), group, order=num_tokens == 33)
    weight = weight._replace(scales=weight.scales / 16)
    x, norm = torch.randn(num_tokens, 288).bfloat16(), Norm(torch.randn(288).bfloat16(), 1e-5)
    bias = torch.randn(74).bfloat16()
    gates, ups = exactly(x, weight, bias, norm).split(37, 1)
    found = gated(x, weight, bias, norm=norm)
    torch.testing.assert_close(found.double(), functional.silu(gates) * ups, atol=0.1, rtol=2**-5)


@kinds
@pytest.mark.parametrize("group", [32, None])
@pytest.mark.parametrize("num_rows", [24, 72, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tokens_result_is_the_same_bits_whatever_is_beside_it(
    kind: str, group: int | None, num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 16, 32 and 64 rows, and of 16 to 64 tokens."""
    monkeypatch.setattr(launches, "NUM_PROCESSORS", 3)
    monkeypatch.setattr(launches, "MIN_PROGRAMS", 1)
    weight = random_codes(kind, (num_rows, 272 if group is None else 288), group, zeros=True)
    size = weight.inputs
    x, norm = torch.randn(MAX_FEW_ROWS, size).to(dtype), Norm(torch.randn(size).to(dtype), 1e-5)
    residual = torch.randn(MAX_FEW_ROWS, num_rows).to(dtype)
    operators: list[Callable[[int], Tensor]] = [
        lambda num: linear(x[:num], weight, residual=residual[:num]),
        lambda num: linear(x[:num], weight, norm=norm),
        lambda num: gated(x[:num], weight, norm=norm),
    ]
    for operator in operators:
        wide = operator(MAX_FEW_ROWS)
        for num_tokens in (1, 2, 9, 16, 17, 33):
            assert torch.equal(operator(num_tokens), wide[:num_tokens]), num_tokens


@dtypes
@kinds
@pytest.mark.parametrize("group", [*GROUPS, 24])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_decoded_weights_are_their_values_to_the_bit(
    kind: str, group: int | None, has_zeros: bool, dtype: torch.dtype
) -> None:
    weight = random_codes(kind, (37, 288), group, zeros=has_zeros)
    assert torch.equal(decoded(weight, dtype), weight.values(dtype))


@kinds
@pytest.mark.parametrize("has_order", [False, True])
def test_many_tokens_are_multiplied_with_decoded_weights(kind: str, has_order: bool) -> None:
    weight = random_codes(kind, (24, 160), 32, zeros=True, order=has_order)
    for dtype in TOLERANCES:
        x = torch.randn(MAX_FEW_ROWS + 1, 160).to(dtype)
        residual = torch.randn(MAX_FEW_ROWS + 1, 24).to(dtype)
        expected = exactly(x, weight, residual=residual)
        # Here the product is rounded before the residual is added.
        off = (linear(x, weight, residual=residual).double() - expected).abs().max()
        assert off <= 2 * TOLERANCES[dtype] * expected.abs().max()


@pytest.mark.parametrize(("size", "group"), [(288, 24), (72, None), (50, 25)])
def test_codes_without_kernels_are_torchs(size: int, group: int | None) -> None:
    for kind in KINDS:
        weight, x = random_codes(kind, (20, size), group, order=True), torch.randn(2, size)
        assert_near(linear(x, weight), exactly(x, weight), torch.float32)


def test_nan_stays_with_its_token() -> None:
    x, weight = torch.randn(6, 48), random_codes("counted", (20, 48), 16)
    x[2, 7] = torch.nan
    found = linear(x, weight)
    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4, 5]].isfinite().all()


def test_sizes_that_do_not_go_together_are_an_error() -> None:
    with pytest.raises(ValueError, match="must share their last size"):
        linear(torch.ones(1, 32), random_codes("int8", (8, 64)))
