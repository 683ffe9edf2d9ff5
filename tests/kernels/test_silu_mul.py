"""silu_mul against its reference."""

from typing import Any

import pytest
import torch

from kernels.silu_mul import reference, silu_mul

# In bfloat16 torch rounds the gate before the product, too.
TOLERANCES: dict[torch.dtype, dict[str, Any]] = {
    torch.float32: {"atol": 1e-6, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-7},
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("size", [1, 96, 1500])
def test_gates_open_for_ups(
    device: torch.device, num_tokens: int, size: int, dtype: torch.dtype
) -> None:
    gate_up = (torch.randn(num_tokens, 2 * size) * 3).to(dtype)
    found, expected = silu_mul(gate_up.to(device)), reference.silu_mul(gate_up)
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCES[dtype])


def test_gates_far_from_zero_are_shut_or_open(device: torch.device) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 3.0, 4.0, 5.0]], device=device)
    assert silu_mul(gate_up).tolist() == [[0, 0, 800, 5e4]]
