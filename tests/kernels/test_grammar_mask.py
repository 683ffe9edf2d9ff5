"""Masks of grammars against the reference, bit by bit."""

import numpy as np
import pytest
import torch

from kernels.grammar_mask import hide
from kernels.grammar_mask.reference import masked_row


@pytest.mark.parametrize("vocab_size", [5, 32, 64, 5000])
def test_what_has_no_bit_is_hidden(device: torch.device, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(6, vocab_size)).astype(np.float32)
    rows = np.array([4, 0, 3, 5])
    masks = rng.integers(-(2**31), 2**31, (4, -(-vocab_size // 32))).astype(np.int32)
    masks[2], masks[3] = 0, -1
    found = torch.from_numpy(logits.copy()).to(device)
    hide(found, torch.from_numpy(rows).to(device), torch.from_numpy(masks).to(device))
    expected = logits.copy()
    for row, mask in zip(rows, masks, strict=True):
        expected[row] = masked_row(logits[row], mask)
    np.testing.assert_array_equal(found.cpu().numpy(), expected)


def test_no_row_is_no_change(device: torch.device) -> None:
    logits = torch.ones(2, 40, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    hide(logits, none, torch.zeros(0, 2, dtype=torch.int32, device=device))
    assert logits.eq(1).all()
