"""What is read ahead of a product, by the interpreter."""

import pytest
import torch

from kernels.prefetch import prefetch
from kernels.prefetch.triton import BLOCK, NUM_PROGRAMS, launch


@pytest.mark.parametrize("num_words", [1, BLOCK - 1, BLOCK * NUM_PROGRAMS + 5, BLOCK * 300])
def test_each_word_is_read_once(num_words: int) -> None:
    generator = torch.Generator().manual_seed(num_words)
    words = torch.randint(-(1 << 31), 1 << 31, (num_words,), generator=generator).int()
    assert launch(words).sum(dtype=torch.int32) == words.sum(dtype=torch.int32)


@pytest.mark.parametrize("num_bytes", [4, 1000, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_weight_stays_what_it_was(num_bytes: int, dtype: torch.dtype) -> None:
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = weight.clone()
    prefetch(weight, num_bytes)
    assert torch.equal(weight, before)
