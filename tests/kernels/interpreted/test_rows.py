"""What is computed row by row, against its reference."""

import pytest
import torch

from kernels.rms_norm import reference as norm_reference
from kernels.rms_norm import rms_norm
from kernels.silu_mul import reference as silu_reference
from kernels.silu_mul import silu_mul

# In bfloat16 the last bit may differ, where a sum in another order is on the other side.
TOLERANCES = {
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-7},
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (3, 256), (2, 5, 33), (0, 16), (1, 5000)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rows_are_normed(shape: tuple[int, ...], scale: float, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(shape) * scale).to(dtype), torch.randn(shape[-1]).to(dtype)
    expected = norm_reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, **TOLERANCES[dtype])


def test_heads_among_others_are_normed() -> None:
    heads, weight = torch.full((3, 6, 8), torch.nan), torch.randn(8)
    heads[:, 2:4] = torch.randn(3, 2, 8)
    found = rms_norm(heads[:, 2:4], weight, 1e-6)
    expected = norm_reference.rms_norm(heads[:, 2:4], weight, 1e-6)
    torch.testing.assert_close(found, expected, **TOLERANCES[torch.float32])


@dtypes
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 96, 1500])
def test_gates_open_for_ups(num_tokens: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(num_tokens, 2 * size) * 3).to(dtype)
    found = silu_mul(gate_up)
    torch.testing.assert_close(found, silu_reference.silu_mul(gate_up), **TOLERANCES[dtype])


def test_gates_far_from_zero_are_shut_or_open() -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 3.0, 4.0, 5.0]])
    assert silu_mul(gate_up).tolist() == [[0, 0, 800, 5e4]]
