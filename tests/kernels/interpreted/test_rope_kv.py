"""rope_kv's kernel against its reference."""

import pytest
import torch

from kernels.rope_kv import rope_kv
from tests.kernels.rotations import EPS, NUM_POSITIONS, compare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_kinds_of_heads_agree(dtype: torch.dtype, has_norm: bool, is_interleaved: bool) -> None:
    compare(3, 4, 2, 64, dtype, has_norm=has_norm, is_interleaved=is_interleaved)


@pytest.mark.parametrize("counts", [(1, 1), (3, 1), (4, 4), (7, 1), (8, 2)])
@pytest.mark.parametrize("head_dim", [16, 80, 96])
def test_any_number_and_size_of_heads_agrees(counts: tuple[int, int], head_dim: int) -> None:
    compare(2, *counts, head_dim, torch.float32)


@pytest.mark.parametrize("num_tokens", [0, 1, 24])
def test_any_number_of_tokens_agrees(num_tokens: int) -> None:
    compare(num_tokens, 4, 2, 16, torch.float32)


def test_several_tokens_may_go_to_the_place_of_nobody() -> None:
    heads = torch.randn(3, 4 * 16)
    cache = torch.zeros(2, 1, 2, 1, 16)
    table = torch.ones(2, NUM_POSITIONS, 16)
    positions = torch.arange(3)
    rope_kv(heads, None, None, EPS, table, positions, torch.tensor([1, 0, 1]), cache, False)
    torch.testing.assert_close(cache[0, 0, 1, 0], heads[1, 48:], atol=0, rtol=0)
