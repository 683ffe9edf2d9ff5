"""Masks of grammars against the reference, bit by bit."""

from typing import NamedTuple

import numpy as np
import pytest
import torch

from kernels.grammar_mask import hide
from kernels.grammar_mask.reference import masked_row
from kernels.sample.adjust import Adjustments, Masks
from services.worker.step.sampler import Sampler

VOCAB_SIZES = [5, 32, 64, 5000]


class Case(NamedTuple):
    logits: np.ndarray
    rows: np.ndarray
    masks: np.ndarray
    expected: np.ndarray


def make_case(vocab_size: int) -> Case:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(6, vocab_size)).astype(np.float32)
    rows = np.array([4, 0, 3, 5])
    masks = rng.integers(-(2**31), 2**31, (4, -(-vocab_size // 32))).astype(np.int32)
    masks[2], masks[3] = 0, -1
    expected = logits.copy()
    for row, mask in zip(rows, masks, strict=True):
        expected[row] = masked_row(logits[row], mask)
    return Case(logits, rows, masks, expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_tokens_without_a_bit_are_hidden(device: torch.device, vocab_size: int) -> None:
    case = make_case(vocab_size)
    found = torch.from_numpy(case.logits).to(device, copy=True)
    hide(found, torch.from_numpy(case.rows).to(device), torch.from_numpy(case.masks).to(device))
    np.testing.assert_array_equal(found.cpu().numpy(), case.expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_every_sampler_hides_in_a_copy(sampler: Sampler, vocab_size: int) -> None:
    case = make_case(vocab_size)
    logits = torch.from_numpy(case.logits.copy())
    masks = Masks(torch.from_numpy(case.rows), torch.from_numpy(case.masks))
    found = sampler.adjust(logits, Adjustments(masks))
    np.testing.assert_array_equal(found.numpy(), case.expected)
    np.testing.assert_array_equal(logits.numpy(), case.logits)


def test_no_row_is_no_change(device: torch.device) -> None:
    logits = torch.ones(2, 40, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    hide(logits, none, torch.zeros(0, 2, dtype=torch.int32, device=device))
    assert logits.eq(1).all()
