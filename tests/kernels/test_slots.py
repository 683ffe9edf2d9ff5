"""Sampling and logprobs by slot, against the references."""

import numpy as np
import pytest
import torch

from kernels.logprobs import logprobs_slots
from kernels.logprobs.num_logprobs import MAX_TOP
from kernels.logprobs.reference import logprobs_row
from kernels.sample import NOT_FINITE, NOTHING_LEFT, reference
from kernels.sample.slots import process_slots, sample_slots
from tests.kernels.draws import expected_scores, expected_token, moved, slot_params

NUM_SLOTS = 9
TOLERANCE = 2e-5  # float32 sums of a thousand exponentials


@pytest.mark.parametrize("vocab_size", [1, 17, 2001])
@pytest.mark.parametrize("share_hidden", [0.0, 0.9])
def test_rows_sample_by_their_slots_like_the_reference(
    device: torch.device, vocab_size: int, share_hidden: float
) -> None:
    rng = np.random.default_rng(vocab_size)
    params = slot_params(rng, NUM_SLOTS)
    slots = rng.integers(0, NUM_SLOTS, 8).astype(np.int32)
    positions = rng.integers(0, 10**6, 8)
    logits = rng.normal(size=(8, vocab_size)).astype(np.float32) * 6
    hidden = rng.random(logits.shape) < share_hidden
    hidden[:, 0] = False
    adjusted = np.where(hidden, -np.inf, logits).astype(np.float32)
    tokens = sample_slots(
        torch.from_numpy(logits).to(device),
        torch.from_numpy(adjusted).to(device),
        moved(params, device),
        torch.from_numpy(slots).to(device),
        torch.from_numpy(positions).to(device),
    )
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [
        expected_token(row, params, slot, position)
        for row, slot, position in zip(adjusted, slots.tolist(), positions.tolist(), strict=True)
    ]


def test_logits_of_some_tokens_are_checked_and_spread_ones_drawn_from(
    device: torch.device,
) -> None:
    """Other tokens may hold anything; they are not read."""
    rng = np.random.default_rng(5)
    params = slot_params(rng, NUM_SLOTS)
    ids = np.sort(rng.permutation(2001)[:700])
    logits = rng.normal(size=(NUM_SLOTS, 700)).astype(np.float32) * 6
    spread = np.full((NUM_SLOTS, 2001), -np.inf, np.float32)
    spread[:, ids] = logits
    logits[3, 699] = np.nan
    slots = torch.arange(NUM_SLOTS, dtype=torch.int32, device=device)
    tokens = sample_slots(
        torch.from_numpy(logits).to(device),
        torch.from_numpy(spread).to(device),
        moved(params, device),
        slots,
        slots.long(),
    )
    wanted = [expected_token(row, params, slot, slot) for slot, row in enumerate(spread)]
    wanted[3] = NOT_FINITE
    assert tokens.tolist() == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_slots_that_cannot_be_sampled_have_a_code_in_place_of_a_token(
    device: torch.device, temperature: float
) -> None:
    params = moved(
        slot_params(np.random.default_rng(0), NUM_SLOTS, temperature=temperature), device
    )
    logits = torch.zeros(5, 2001, device=device)
    logits[1, 7], logits[2, 2000], logits[3] = torch.nan, torch.inf, -torch.inf
    slots = torch.arange(5, dtype=torch.int32, device=device)
    positions = slots.long()
    tokens = sample_slots(logits, logits, params, slots, positions)
    assert tokens[1:4].tolist() == [NOT_FINITE] * 3
    assert tokens[[0, 4]].min() >= 0
    adjusted = logits.nan_to_num(1.0, 1.0, 1.0)
    adjusted[[0, 2]] = -torch.inf
    tokens = sample_slots(logits, adjusted, params, slots, positions)
    assert tokens[:4].tolist() == [NOTHING_LEFT, *[NOT_FINITE] * 3]
    assert tokens[4] >= 0


def test_scores_are_the_ones_sampled_from(device: torch.device) -> None:
    rng, num_slots = np.random.default_rng(3), 12
    params = slot_params(rng, num_slots)
    slots = torch.arange(num_slots, dtype=torch.int32, device=device)
    logits = torch.from_numpy(rng.normal(size=(num_slots, 2001)).astype(np.float32) * 4)
    logits[:, ::5] = -torch.inf
    scores = process_slots(logits.to(device), moved(params, device), slots).cpu()
    for slot, (row, ours) in enumerate(zip(logits.numpy(), scores.numpy(), strict=True)):
        np.testing.assert_array_equal(ours, expected_scores(row, params, slot))


@pytest.mark.parametrize("values", [{"top_k": 30}, {"top_p": 0.6}, {"top_k": 30, "top_p": 0.6}])
def test_ties_with_the_last_token_are_kept(device: torch.device, values: dict[str, float]) -> None:
    """Scores on a grid, with both zeros; equal rows give equal samples."""
    rng = np.random.default_rng(11)
    filters = {
        "temperature": 1.0,
        "min_p": 0.0,
        "top_n_sigma": 0.0,
        "top_k": 0,
        "top_p": 1.0,
    } | values
    params = slot_params(rng, NUM_SLOTS, **filters)
    on_device = moved(params, device)
    logits = (rng.integers(-9, 2, (3, 2001)) / 4).astype(np.float32)
    logits[(logits == 0) & (rng.random(logits.shape) < 0.5)] = -0.0
    slots = torch.full((3,), 4, dtype=torch.int32, device=device)
    positions = torch.full((3,), 77, device=device)
    scores = process_slots(torch.from_numpy(logits).to(device), on_device, slots).cpu()
    for row, ours in zip(logits, scores, strict=True):
        is_kept = reference.kept_by_top_k(row, int(params.top_k[4]))
        expected = np.where(is_kept, row, -np.inf).astype(float)
        is_kept &= reference.kept_by_top_p(expected, params.top_p[4].item())
        np.testing.assert_array_equal(ours.isfinite(), is_kept)
    same = torch.from_numpy(logits[:1]).expand(3, -1).contiguous().to(device)
    tokens = sample_slots(same, same, on_device, slots, positions)
    assert (tokens == expected_token(logits[0], params, 4, 77)).all()


@pytest.mark.parametrize("vocab_size", [20, 2001])
def test_logprobs_of_rows_that_want_them_match_the_reference(
    device: torch.device, vocab_size: int
) -> None:
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
    arguments = (torch.from_numpy(logits), torch.from_numpy(tokens), wants, slots)
    result = logprobs_slots(*(each.to(device) for each in arguments))
    values, top_ids, ranks = (each.cpu() for each in result)
    assert (values.dtype, top_ids.dtype, ranks.dtype) == (torch.float32, torch.int32, torch.int32)
    for row in (0, 2, 3, 4, 5):
        own, rank, top_values, ids = logprobs_row(logits[row], int(tokens[row]), MAX_TOP)
        np.testing.assert_allclose(values[row, 1:], top_values, atol=TOLERANCE)
        assert top_ids[row].tolist() == ids
        if tokens[row] >= 0:
            np.testing.assert_allclose(values[row, 0], own, atol=TOLERANCE)
            assert ranks[row] == rank


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_names_tokens_and_disturbs_no_other(
    device: torch.device, wrong: float
) -> None:
    rng = np.random.default_rng(2)
    logits = torch.from_numpy(rng.normal(size=(3, 2001)).astype(np.float32)).to(device)
    tokens = torch.tensor([5, 6, -1], device=device)
    slots = torch.arange(3, dtype=torch.int32, device=device)
    wants = torch.full((3,), MAX_TOP, dtype=torch.int32, device=device)
    expected = logprobs_slots(logits, tokens, wants, slots)
    broken = logits.clone()
    broken[1, ::3] = wrong
    result = logprobs_slots(broken, tokens, wants, slots)
    assert ((result[1] >= 0) & (result[1] < 2001)).all()
    for ours, theirs in zip(result, expected, strict=True):
        assert ours[0].equal(theirs[0])
        assert ours[2].equal(theirs[2])
