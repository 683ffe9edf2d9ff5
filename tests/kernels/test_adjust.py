"""Requests' logits rules, against the reference row by row."""

from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.grammar_mask.reference import masked_row
from kernels.sample import RowChange, adjust, prepare_adjustments, prepare_random_rows, sample
from kernels.sample.reference import adjusted_row, sample_row
from kernels.sample.slot_params import SlotParams

VOCAB_SIZE = 50
CPU = torch.device("cpu")


def distinct_ids(rng: np.random.Generator, max_num: int) -> np.ndarray:
    return rng.permutation(VOCAB_SIZE)[: rng.integers(0, max_num + 1)]


def random_change(rng: np.random.Generator, row: int) -> RowChange:
    biased, emitted = distinct_ids(rng, 5), distinct_ids(rng, 8)
    return RowChange(
        row,
        distinct_ids(rng, 10),
        distinct_ids(rng, 5),
        biased,
        rng.normal(size=len(biased)).astype(np.float32) * 10,
        distinct_ids(rng, 20),
        float(rng.choice([0.5, 1.3, 2.0])),
        emitted,
        rng.integers(1, 9, len(emitted)),
        float(rng.uniform(-2, 2)),
        float(rng.uniform(-2, 2)),
    )


def random_masks(rng: np.random.Generator, num_rows: int) -> dict[int, np.ndarray]:
    rows = rng.permutation(num_rows)[: rng.integers(0, num_rows + 1)].tolist()
    return {row: rng.integers(-(2**31), 2**31, 2).astype(np.int32) for row in rows}


def expected_row(
    logits: np.ndarray, row: int, changes: list[RowChange], masks: dict[int, np.ndarray]
) -> np.ndarray:
    found = masked_row(logits[row], masks[row]) if row in masks else logits[row]
    for change in changes:
        if change.row == row:
            found = adjusted_row(found, change)
    return found


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 6))
def test_a_mixed_batch_is_adjusted_as_the_reference_adjusts_row_by_row(
    device: torch.device, seed: int, num: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(num, VOCAB_SIZE)).astype(np.float32) * 5)
    before = logits.clone()
    changes = [random_change(rng, row) for row in range(num) if rng.integers(2)]
    masks = random_masks(rng, num)
    adjustments = prepare_adjustments(changes, masks, partial(torch.as_tensor, device=device))
    assert (adjustments is None) == (not changes and not masks)
    if adjustments is None:
        return
    raw_logits = logits.to(device)
    adjusted = adjust(raw_logits, adjustments).cpu()
    logits = raw_logits.cpu()
    assert logits.equal(before), "clients may get logprobs of the raw logits"
    for row in range(num):
        expected = expected_row(before.numpy(), row, changes, masks)
        np.testing.assert_allclose(adjusted[row], expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=200)
@given(st.integers(0, 10**9), st.integers(1, 6))
def test_adjusted_rows_sample_like_the_reference(seed: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num, VOCAB_SIZE)).astype(np.float32) * 5
    changes = [random_change(rng, row) for row in range(num)]
    values = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], num).astype(np.float32),
        "top_k": rng.choice([0, 1, 5, 300], num),
        "top_p": rng.choice([1.0, 0.9, 0.2], num).astype(np.float32),
        "min_p": rng.choice([0.0, 0.01, 0.3], num).astype(np.float32),
        "top_n_sigma": rng.choice([0.0, 0.5, 1.9], num).astype(np.float32),
        "seeds": rng.integers(-(2**63), 2**63 - 1, num),
        "positions": rng.integers(0, 10**6, num),
        "choices": rng.integers(0, 9, num),
    }
    masks = random_masks(rng, num)
    adjustments = prepare_adjustments(changes, masks, torch.from_numpy)
    assert adjustments is not None
    adjusted = adjust(torch.from_numpy(logits), adjustments)
    params = SlotParams(**{name: values[name] for name in SlotParams._fields})
    tokens = sample(adjusted, prepare_random_rows(params, values["positions"], CPU)).tolist()
    for row in range(num):
        truth = expected_row(logits, row, changes, masks)
        if np.isfinite(truth).any():
            arguments = [array[row].item() for array in values.values()]
            assert tokens[row] == sample_row(truth, *arguments)
