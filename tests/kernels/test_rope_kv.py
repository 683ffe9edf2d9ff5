"""rope_kv against its reference."""

from typing import Literal

import pytest
import torch

from kernels.kv_codes import HIGHEST_CODE
from kernels.rope_kv import rope_kv
from tests.kernels.rotations import TOLERANCES, compare

dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
# queries, keys, head size: Qwen3-8B's, and others that leave a program's heads or sizes partly
# unused
HEADS = [(32, 8, 128), (1, 1, 16), (3, 1, 80), (4, 4, 96), (7, 1, 80), (8, 2, 16)]


@dtypes
@pytest.mark.parametrize("norm", ["none", "heads", "tokens"])
@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "interleaved"])
def test_kinds_of_heads_agree(
    device: torch.device,
    dtype: torch.dtype,
    norm: Literal["none", "heads", "tokens"],
    is_interleaved: bool,
) -> None:
    compare(3, 4, 2, 64, dtype, norm=norm, is_interleaved=is_interleaved, device=device)


@dtypes
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_number_and_size_of_heads_agrees(
    device: torch.device, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    compare(2, *heads, dtype, device=device)


@dtypes
@pytest.mark.parametrize("norm", ["none", "heads", "tokens"])
@pytest.mark.parametrize("is_interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [2, 32, 78])
def test_heads_that_are_rotated_in_part_agree(
    device: torch.device,
    rotary_dim: int,
    dtype: torch.dtype,
    norm: Literal["none", "heads", "tokens"],
    is_interleaved: bool,
) -> None:
    compare(
        *(3, 4, 2, 80, dtype),
        norm=norm,
        is_interleaved=is_interleaved,
        device=device,
        rotary_dim=rotary_dim,
    )


@dtypes
@pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)
@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 80)], ids=str)
def test_codes_agree(
    device: torch.device, heads: tuple[int, int, int], codes: torch.dtype, dtype: torch.dtype
) -> None:
    compare(9, *heads, dtype, device=device, codes=codes)


@pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)
def test_codes_of_nan_have_a_scale_that_is(device: torch.device, codes: torch.dtype) -> None:
    """Scales of other heads and tokens are not NaN."""
    with device:
        heads = torch.randn(3, 4 * 16)
        heads[1, 33] = torch.nan  # of the key
        cache = torch.zeros(3, 1, 2, 1, 16, dtype=codes)
        scales = torch.zeros(3, 1, 2, 1)
        rotation, slot_mapping = torch.ones(2, 3, 16), torch.arange(3)
    rope_kv(heads, None, None, rotation, slot_mapping, cache, False, scales)
    assert scales.isnan().flatten(1).tolist() == [[False, False], [True, False], [False, False]]


@pytest.mark.parametrize("num_tokens", [0, 1, 24])
def test_any_number_of_tokens_agrees(device: torch.device, num_tokens: int) -> None:
    compare(num_tokens, 4, 2, 64, torch.float32, device=device)


def test_several_tokens_may_go_to_one_entry_of_the_null_block(device: torch.device) -> None:
    with device:
        heads = torch.randn(3, 4 * 16)
        cache = torch.zeros(2, 1, 2, 1, 16)
        rotation, slot_mapping = torch.ones(2, 3, 16), torch.tensor([1, 0, 1])
    rope_kv(heads, None, None, rotation, slot_mapping, cache, False)
    torch.testing.assert_close(cache[0, 0, 1, 0], heads[1, 48:], atol=0, rtol=0)
