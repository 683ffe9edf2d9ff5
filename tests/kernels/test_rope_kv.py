"""rope_kv in torch, and on cards, against its reference."""

import pytest
import torch

from tests.kernels.rotations import compare


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_torch_agrees(has_norm: bool, is_interleaved: bool, num_tokens: int) -> None:
    kind = {"has_norm": has_norm, "is_interleaved": is_interleaved}
    compare(num_tokens, 4, 2, 16, torch.float32, **kind)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (4, 2, 64), (8, 2, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_cards_agree(heads: tuple[int, int, int], dtype: torch.dtype, is_interleaved: bool) -> None:
    compare(20, *heads, dtype, is_interleaved=is_interleaved, device=torch.device("cuda"))
