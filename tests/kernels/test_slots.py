"""Drawing and logprobs by what lies by slot, against the references."""

import numpy as np
import pytest
import torch

from kernels.logprobs import MAX_TOP, logprobs_slots
from kernels.logprobs.reference import logprobs_row
from kernels.sample import NOT_FINITE, NOTHING_LEFT, reference
from kernels.sample.slots import SlotParams, process_slots, sample_slots

NUM_SLOTS = 9
TOLERANCE = 2e-5  # float32 sums of a thousand exponentials


def slot_params(rng: np.random.Generator, **values: float) -> SlotParams:
    """Of all slots a mixture, but for what is given."""
    drawn = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], NUM_SLOTS),
        "top_k": rng.choice([0, 1, 5, 300], NUM_SLOTS),
        "top_p": rng.choice([1.0, 0.9, 0.2], NUM_SLOTS),
        "min_p": rng.choice([0.0, 0.01, 0.3], NUM_SLOTS),
        "seeds": rng.integers(-(2**63), 2**63 - 1, NUM_SLOTS),
        "choices": rng.integers(0, 9, NUM_SLOTS),
    }
    given = {name: np.full(NUM_SLOTS, value) for name, value in values.items()}
    dtypes = {"top_k": np.int32, "choices": np.int32, "seeds": np.int64}
    arrays = {
        name: array.astype(dtypes.get(name, np.float32)) for name, array in (drawn | given).items()
    }
    return SlotParams(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def expected_token(row: np.ndarray, params: SlotParams, slot: int, position: int) -> int:
    temperature, top_k, top_p, min_p, seed, choice = (values[slot].item() for values in params)
    return reference.sample_row(row, temperature, top_k, top_p, min_p, seed, position, choice)


@pytest.mark.parametrize("vocab_size", [1, 17, 2001])
@pytest.mark.parametrize("share_hidden", [0.0, 0.9])
def test_rows_draw_by_their_slots_what_the_reference_draws(
    vocab_size: int, share_hidden: float
) -> None:
    rng = np.random.default_rng(vocab_size)
    params = slot_params(rng)
    slots = rng.integers(0, NUM_SLOTS, 8).astype(np.int32)
    positions = rng.integers(0, 10**6, 8)
    logits = rng.normal(size=(8, vocab_size)).astype(np.float32) * 6
    hidden = rng.random(logits.shape) < share_hidden
    hidden[:, 0] = False
    adjusted = np.where(hidden, -np.inf, logits).astype(np.float32)
    tokens = sample_slots(
        torch.from_numpy(logits),
        torch.from_numpy(adjusted),
        params,
        torch.from_numpy(slots),
        torch.from_numpy(positions),
    )
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [
        expected_token(row, params, slot, position)
        for row, slot, position in zip(adjusted, slots.tolist(), positions.tolist(), strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_cannot_be_drawn_is_said(temperature: float) -> None:
    params = slot_params(np.random.default_rng(0), temperature=temperature)
    logits = torch.zeros(5, 300)
    logits[1, 7], logits[2, 299], logits[3] = torch.nan, torch.inf, -torch.inf
    slots, positions = torch.arange(5, dtype=torch.int32), torch.arange(5)
    tokens = sample_slots(logits, logits, params, slots, positions)
    assert tokens[1:4].tolist() == [NOT_FINITE] * 3
    assert tokens[[0, 4]].min() >= 0
    adjusted = logits.nan_to_num(1.0, 1.0, 1.0)
    adjusted[[0, 2]] = -torch.inf
    tokens = sample_slots(logits, adjusted, params, slots, positions)
    assert tokens[:4].tolist() == [NOTHING_LEFT, *[NOT_FINITE] * 3]
    assert tokens[4] >= 0


def test_scores_are_those_that_are_drawn_from() -> None:
    rng = np.random.default_rng(3)
    params = slot_params(rng)
    slots = torch.arange(NUM_SLOTS, dtype=torch.int32)
    logits = torch.from_numpy(rng.normal(size=(NUM_SLOTS, 700)).astype(np.float32) * 4)
    logits[:, ::5] = -torch.inf
    scores = process_slots(logits, params, slots)
    for slot, (row, ours) in enumerate(zip(logits.numpy(), scores.numpy(), strict=True)):
        temperature, top_k, top_p, min_p, _, _ = (values[slot].item() for values in params)
        expected = row
        if temperature > 0:
            expected = row / np.float32(temperature)
            for keep, value in (
                (reference.kept_by_min_p, min_p),
                (reference.kept_by_top_k, top_k),
                (reference.kept_by_top_p, top_p),
            ):
                expected = np.where(keep(expected.astype(float), value), expected, -np.inf)
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("values", [{"top_k": 30}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.6}])
def test_what_ties_with_the_last_is_kept(values: dict[str, float]) -> None:
    """Scores on a grid, both zeros among them, and rows that are alike draw alike."""
    rng = np.random.default_rng(11)
    params = slot_params(rng, temperature=1.0, min_p=0.0, **({"top_k": 0, "top_p": 1.0} | values))
    logits = (rng.integers(-9, 2, (3, 1200)) / 4).astype(np.float32)
    logits[(logits == 0) & (rng.random(logits.shape) < 0.5)] = -0.0
    slots, positions = torch.full((3,), 4, dtype=torch.int32), torch.full((3,), 77)
    scores = process_slots(torch.from_numpy(logits), params, slots)
    for row, ours in zip(logits, scores, strict=True):
        is_kept = reference.kept_by_top_k(row, int(params.top_k[4]))
        expected = np.where(is_kept, row, -np.inf).astype(float)
        is_kept &= reference.kept_by_top_p(expected, params.top_p[4].item())
        np.testing.assert_array_equal(ours.isfinite(), is_kept)
    same = torch.from_numpy(logits[:1]).expand(3, -1).contiguous()
    tokens = sample_slots(same, same, params, slots, positions)
    assert (tokens == expected_token(logits[0], params, 4, 77)).all()


@pytest.mark.parametrize("vocab_size", [20, 1500])
def test_logprobs_of_rows_that_want_them_are_those_of_the_reference(vocab_size: int) -> None:
    """With ties, hidden logits and both zeros among them."""
    rng = np.random.default_rng(vocab_size)
    wants = torch.tensor([-2, -1, 0, 3, 20], dtype=torch.int32)
    slots = torch.tensor([4, 0, 1, 3, 2, 3], dtype=torch.int32)
    logits = (rng.integers(-20, 20, (6, vocab_size)) / 4).astype(np.float32)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[(logits == 0) & (rng.random(logits.shape) < 0.5)] = -0.0
    logits[:, 5] = 0
    tokens = rng.integers(0, vocab_size, 6)
    tokens[3] = NOT_FINITE
    values, top_ids, ranks = logprobs_slots(
        torch.from_numpy(logits), torch.from_numpy(tokens), wants, slots
    )
    assert (values.dtype, top_ids.dtype, ranks.dtype) == (torch.float32, torch.int32, torch.int32)
    for row in (0, 2, 3, 4, 5):
        own, rank, top_values, ids = logprobs_row(logits[row], int(tokens[row]), MAX_TOP)
        np.testing.assert_allclose(values[row, 1:], top_values, atol=TOLERANCE)
        assert top_ids[row].tolist() == ids
        if tokens[row] >= 0:
            np.testing.assert_allclose(values[row, 0], own, atol=TOLERANCE)
            assert ranks[row] == rank
