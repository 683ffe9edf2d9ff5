"""rms_norm against its reference."""

import pytest
import torch

from kernels.rms_norm import reference, rms_norm


@pytest.mark.parametrize("shape", [(1, 8), (3, 256), (2, 5, 33), (0, 16)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_float32_agrees(shape: tuple[int, ...], scale: float) -> None:
    x, weight = torch.randn(shape) * scale, torch.randn(shape[-1])
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, atol=1e-6, rtol=1e-5)


def test_bfloat16_agrees_to_its_last_bits() -> None:
    x, weight = torch.randn(7, 256).bfloat16(), torch.randn(256).bfloat16()
    expected = reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected, atol=1e-3, rtol=2**-7)
