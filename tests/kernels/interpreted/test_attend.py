"""The kernels of attend against the reference of paged attention."""

import pytest
import torch

from kernels.paged_attention import TILE, triton
from tests.kernels.attended import (
    Heads,
    Step,
    assert_later_tokens_do_not_matter,
    compare,
)

TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 2e-2
SMALL = Heads(4, 2, 16)


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program takes the interpreter half a millisecond, if it has no keys too."""
    monkeypatch.setattr(triton, "NUM_SPLITS", 2)


@pytest.mark.parametrize("start", [0, 1, 14, 15, 16, 31, 32, 63])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_edges_of_blocks_and_tiles_agree(start: int, width: int) -> None:
    compare(Step([start, 0], width, block_size=16), SMALL, TOLERANCE)


@pytest.mark.parametrize("group_size", [1, 3, 4, 8, 20])
@pytest.mark.parametrize("hides", [False, True])
def test_any_group_of_heads_agrees(group_size: int, hides: bool) -> None:
    heads = Heads(group_size, 1, 16)
    compare(Step([0, 37], 2, [(20, 3)], hides=hides), heads, TOLERANCE)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_head_size_agrees(head_dim: int, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    step = Step([70], 3, [(5, 20)], block_size=16)
    compare(step, Heads(4, 1, head_dim), tolerance, dtype)


@pytest.mark.parametrize("width", [4, 9, 17])
def test_more_queries_than_a_program_takes_agree(width: int) -> None:
    compare(Step([3, 40], width), Heads(8, 1, 16), TOLERANCE)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
def test_any_block_size_agrees(block_size: int) -> None:
    compare(Step([20, 5], 3, [(2, 9)], block_size=block_size), SMALL, TOLERANCE)


@pytest.mark.parametrize("num_splits", [1, 4, 16])
@pytest.mark.parametrize("start", [62, 63, 64, 200])
def test_any_number_of_splits_agrees(
    num_splits: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "NUM_SPLITS", num_splits)
    compare(Step([start, 3], 2, block_size=16), SMALL, TOLERANCE)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 33, TILE, TILE + 1])
@pytest.mark.parametrize("hides", [False, True])
def test_chunks_of_any_length_agree(num_tokens: int, hides: bool) -> None:
    chunks = [(0, num_tokens), (7, 3), (33, 1)]
    compare(Step(chunks=chunks, block_size=16, hides=hides), SMALL, TOLERANCE)


def test_chunks_in_bfloat16_agree() -> None:
    step = Step(chunks=[(0, TILE + 5), (90, 70)], block_size=16)
    compare(step, SMALL, BFLOAT16_TOLERANCE, torch.bfloat16)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the last token, which sees them
def test_what_later_tokens_are_does_not_matter() -> None:
    assert_later_tokens_do_not_matter(SMALL)


def test_nothing_has_no_result() -> None:
    compare(Step(), SMALL, TOLERANCE)
