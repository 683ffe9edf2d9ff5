"""GEMMs specific to GPUs, compared with float32 references: more tokens than the kernels take,
results wider than the operands, and weights that are slices of others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.linear import FEW_TOKENS, gated, linear, reference
from kernels.rms_norm import Norm

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SIZE = 1024
EPS = 1e-6
# Results are about 1. Above FEW_TOKENS bfloat16 rounds normed inputs, and gates before ups.
FLOAT32: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}
BFLOAT16: dict[str, Any] = {"atol": 0.03, "rtol": 2**-6}
TOLERANCES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
nums = pytest.mark.parametrize("num_tokens", [1, FEW_TOKENS, FEW_TOKENS + 1, 300])


def normals(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=CUDA).to(dtype)


def weights(*shape: int, dtype: torch.dtype) -> Tensor:
    return normals(*shape, dtype=dtype) / SIZE**0.5


@dtypes
@nums
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_gates_open_for_ups(num_tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, norm = normals(num_tokens, SIZE, dtype=dtype), Norm(normals(SIZE, dtype=dtype), EPS)
    weight = weights(2 * 1032, SIZE, dtype=dtype)
    bias = normals(2 * 1032, dtype=dtype) if has_bias else None
    found, expected = (each(x, weight, bias, norm=norm) for each in (gated, reference.gated))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, **TOLERANCES[dtype])


@dtypes
@nums
@pytest.mark.parametrize("has_out", [False, True], ids=["new", "given"])
def test_logits_are_not_rounded(num_tokens: int, has_out: bool, dtype: torch.dtype) -> None:
    """More precise than bfloat16, into rows of a buffer or a new tensor."""
    x, weight = normals(num_tokens, SIZE, dtype=dtype), weights(8200, SIZE, dtype=dtype)
    buffer = torch.full((num_tokens + 1, 8200), torch.nan, device=CUDA)
    out = buffer[:num_tokens] if has_out else None
    found = linear(x, weight, out_dtype=torch.float32, out=out)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference.linear(x, weight), **FLOAT32)
    if has_out:
        assert found.data_ptr() == buffer.data_ptr()
        assert buffer[num_tokens].isnan().all()


@nums
def test_normed_logits_agree(num_tokens: int) -> None:
    dtype = torch.bfloat16
    x, norm = normals(num_tokens, SIZE, dtype=dtype), Norm(normals(SIZE, dtype=dtype), EPS)
    weight = weights(8200, SIZE, dtype=dtype)
    found = linear(x, weight, norm=norm, out_dtype=torch.float32)
    torch.testing.assert_close(found, reference.linear(x, weight, norm=norm), **BFLOAT16)


@dtypes
@nums
@pytest.mark.parametrize("half", [0, 1])
def test_half_of_a_weight_multiplies_among_nan(
    num_tokens: int, half: int, dtype: torch.dtype
) -> None:
    """Like the split projection of a draft's hidden state and embedding."""
    x, residual = normals(num_tokens, SIZE, dtype=dtype), normals(num_tokens, 520, dtype=dtype)
    norm, whole = Norm(normals(SIZE, dtype=dtype), EPS), weights(520, 2 * SIZE, dtype=dtype)
    halves = torch.split(whole, SIZE, 1)
    halves[1 - half].fill_(torch.nan)
    terms: dict[str, Any] = {"norm": norm, "residual": residual}
    expected = reference.linear(x, halves[half], **terms)
    found = linear(x, halves[half], **terms)
    torch.testing.assert_close(found.float(), expected, **TOLERANCES[dtype])
