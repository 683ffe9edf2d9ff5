"""rope against its reference."""

import pytest
import torch

from kernels.rope import reference, rope, rope_interleaved


def rotation(positions: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, head_dim, 2) / head_dim
    angles = positions[:, None] * 100.0**-exponents
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    return angles.cos().repeat(1, 2)[:, None], sin[:, None]


def interleaved(x: torch.Tensor) -> torch.Tensor:
    """Neighbours where there were halves."""
    return torch.stack(x.chunk(2, -1), -1).flatten(-2)


@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 64), (9, 6, 8)])
def test_float32_agrees(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    cos, sin = rotation(torch.randint(0, 999, shape[:1]), shape[-1])
    expected = reference.rope(x, cos, sin)
    torch.testing.assert_close(rope(x, cos, sin), expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_rounded_once() -> None:
    x = torch.randn(6, 4, 32).bfloat16()
    cos, sin = rotation(torch.arange(6), 32)
    torch.testing.assert_close(
        rope(x, cos, sin), reference.rope(x, cos, sin), atol=2e-3, rtol=2**-7
    )


def test_products_of_rotated_vectors_depend_on_their_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 16)
    products = [
        (rope(query, *rotation(torch.tensor([at + 3]), 16)) * rope(key, *rotation(at, 16))).sum()
        for at in torch.arange(4)[:, None]
    ]
    torch.testing.assert_close(torch.stack(products), products[0].expand(4), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_interleaved_is_the_same_rotation_of_other_pairs(dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 16).to(dtype)
    cos, sin = rotation(torch.randint(0, 999, (7,)), 16)
    rotated = rope_interleaved(interleaved(x), interleaved(cos), interleaved(sin))
    torch.testing.assert_close(rotated, interleaved(rope(x, cos, sin)))
    truth = reference.rope_interleaved(interleaved(x), interleaved(cos), interleaved(sin))
    torch.testing.assert_close(rotated, truth)
