"""rms_norm against its reference."""

from typing import Any

import pytest
import torch

from kernels.rms_norm import reference, rms_norm

# In bfloat16 the last bit may differ with another order of the sum.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-7},
}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@dtypes
@pytest.mark.parametrize("shape", [(1, 8), (3, 256), (2, 5, 33), (0, 16), (1, 5000)], ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rows_are_normed(
    device: torch.device, shape: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    x, weight = (torch.randn(shape) * scale).to(dtype), torch.randn(shape[-1]).to(dtype)
    found = rms_norm(x.to(device), weight.to(device), 1e-6)
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCES[dtype])


def test_a_weight_in_float32_norms_rows_of_bfloat16(device: torch.device) -> None:
    x, weight = torch.randn(5, 72).bfloat16(), torch.randn(72) + 1
    found, expected = (
        rms_norm(x.to(device), weight.to(device), 1e-6),
        reference.rms_norm(x, weight, 1e-6),
    )
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCES[x.dtype])


def test_heads_among_others_are_normed(device: torch.device) -> None:
    heads, weight = torch.full((3, 6, 8), torch.nan), torch.randn(8)
    heads[:, 2:4] = torch.randn(3, 2, 8)
    found = rms_norm(heads.to(device)[:, 2:4], weight.to(device), 1e-6)
    expected = reference.rms_norm(heads[:, 2:4], weight, 1e-6)
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCES[torch.float32])
