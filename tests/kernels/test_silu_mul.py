"""silu_mul against its reference."""

from typing import Any

import pytest
import torch

from kernels.silu_mul import CURVES, Act, Clamp, reference, silu_mul

# In bfloat16 torch also rounds the gate before the multiplication. GELU of low gates has few
# digits.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 5e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-7},
}
acts = pytest.mark.parametrize("act", [*CURVES])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 96, 1500])
@pytest.mark.parametrize("act", [*CURVES, Clamp(1.702, 2.5)], ids=str)
def test_gates_open_for_ups(
    device: torch.device, act: Act | Clamp, num_tokens: int, size: int, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * size) * 3).to(dtype)
    found, expected = silu_mul(gate_up.to(device), act), reference.silu_mul(gate_up, act)
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCES[dtype])


@acts
def test_gates_far_from_zero_are_shut_or_open(device: torch.device, act: Act) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 3.0, 4.0, 5.0]], device=device)
    assert silu_mul(gate_up, act).tolist() == [[0, 0, 800, 5e4]]


def test_without_gates_positive_numbers_are_squared(device: torch.device) -> None:
    *found, nan = silu_mul(torch.tensor([-3.0, 0.0, 2.0, torch.nan], device=device), "relu2")
    assert [float(each) for each in found] == [0, 0, 4]
    assert nan != nan


def test_numbers_beyond_the_limit_are_clamped_except_low_gates(device: torch.device) -> None:
    gate_up = torch.tensor([[-200.0, 9.0, 9.0, torch.nan, 9.0, 9.0, -9.0, 9.0]], device=device)
    low, up, down, nan = silu_mul(gate_up, Clamp(100.0, 7.0))[0].tolist()
    assert [low, up, down] == [0, 7 * 8, 7 * -6]
    assert nan != nan
