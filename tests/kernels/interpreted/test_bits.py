"""A token's result has the same bits in every batch: with numbers of tokens on both sides of each
block size."""

import pytest
import torch

from kernels import switches
from kernels.linear import FEW_TOKENS
from kernels.paged_attention import PLAIN, AttentionOptions, triton
from tests.kernels import bits
from tests.kernels.attended import Heads, assert_first_tokens_do_not_matter, decoded_rows

CPU = torch.device("cpu")
NUMS = [1, 2, 16, 17, 33]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@dtypes
@pytest.mark.parametrize("kind", bits.KINDS)
def test_of_products(kind: str, dtype: torch.dtype) -> None:
    compute = bits.products(kind, (32, 272), FEW_TOKENS, dtype, CPU)
    bits.assert_rows_stand_alone(compute, FEW_TOKENS, NUMS)


@dtypes
def test_of_norms_and_rotations(dtype: torch.dtype) -> None:
    bits.assert_rows_stand_alone(bits.norms(272, 20, dtype, CPU), 20, NUMS[:-1])
    bits.assert_rows_stand_alone(bits.rotations((4, 2, 16), 20, dtype, CPU), 20, NUMS[:-1])


@dtypes
@pytest.mark.parametrize(
    ("width", "options", "codes"),
    [
        (1, PLAIN, None),
        (3, PLAIN, None),
        (3, AttentionOptions(window=20), None),
        (3, PLAIN, torch.int8),
        (1, AttentionOptions(window=20), torch.uint8),
    ],
    ids=str,
)
def test_of_rows_that_decode(
    width: int,
    options: AttentionOptions,
    codes: torch.dtype | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton, "NUM_SPLITS", 2)
    monkeypatch.setattr(switches, "SPLIT_KEYS", 32)
    compute = decoded_rows(Heads(4, 2, 16), width, 4, dtype, CPU, options, codes)
    bits.assert_rows_stand_alone(compute, 4, [1, 2, 3])


@pytest.mark.parametrize(
    ("window", "codes"),
    [
        *((None, None), (5, None), (33, torch.int8)),
        *(pytest.param(each, None, marks=pytest.mark.slow) for each in (33, 90)),
    ],
)
def test_a_tokens_result_does_not_depend_on_the_start_of_its_row(
    window: int | None, codes: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "NUM_SPLITS", 4)
    monkeypatch.setattr(switches, "SPLIT_KEYS", 16)
    options = AttentionOptions(window)
    assert_first_tokens_do_not_matter(Heads(2, 1, 16), 3, torch.float32, CPU, options, codes)
