"""Sampling and logprobs for many rows at once, each with other parameters: on a GPU 200 rows of
Qwen3's vocabulary, in concurrent programs."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import IS_INTERPRETED
from kernels.logprobs import logprobs_slots
from kernels.logprobs.num_logprobs import MAX_TOP, NO_LOGPROBS
from kernels.logprobs.reference import logprobs_row
from kernels.sample import NOT_FINITE, NOTHING_LEFT
from kernels.sample.slot_params import SlotParams
from kernels.sample.slots import process_slots, sample_slots
from tests.kernels.draws import expected_scores, expected_token, moved, slot_params

SIZES = {"cpu": (24, 601) if IS_INTERPRETED else (144, 5003), "cuda": (200, 151_936)}
FEW = [1, 8]
EMPTY = 4  # the row with no visible logit
CODES = {2: NOT_FINITE, EMPTY: NOTHING_LEFT, 5: NOT_FINITE}  # in place of a token
NEAR = 1e-5  # a mass so close to p, in float32, may fall on either side
TOLERANCE = 2e-5  # float32 sums of exponentials


class Crowd(NamedTuple):
    logits: Tensor  # [S, V]
    adjusted: Tensor  # [S, V]
    params: SlotParams  # of S slots
    slots: Tensor  # [S], in any order
    positions: Tensor  # [S]

    def some(self, num: int) -> "Crowd":
        """The first rows, without copying."""
        rows = (self.slots[:num], self.positions[:num])
        return Crowd(self.logits[:num], self.adjusted[:num], self.params, *rows)

    def to(self, device: torch.device) -> "Crowd":
        params = moved(self.params, device)
        logits, adjusted, _, slots, positions = self
        return Crowd(
            logits.to(device), adjusted.to(device), params, slots.to(device), positions.to(device)
        )


@cache
def crowd(num_rows: int, vocab_size: int) -> Crowd:
    """Flat rows, with brackets longer than a list, and steep ones; a third on a grid, so that
    thousands tie; a third with hidden logits, one of them with no others."""
    rng = np.random.default_rng(1)
    params = slot_params(rng, num_rows)
    logits = rng.standard_normal((num_rows, vocab_size), np.float32)
    logits *= rng.choice([0.01, 1.0, 3.0, 12.0], (num_rows, 1)).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 4) / 4
    adjusted = logits.copy()
    adjusted[1::3][rng.random(adjusted[1::3].shape, np.float32) < 0.5] = -np.inf
    adjusted[EMPTY] = -np.inf
    logits[2, -1], logits[5, 0] = np.nan, np.inf
    arrays = (rng.permutation(num_rows).astype(np.int32), rng.integers(0, 10**6, num_rows))
    tensors = map(torch.from_numpy, (logits, adjusted, *arrays))
    first, second, *others = tensors
    return Crowd(first, second, params, *others)


def test_each_row_of_a_crowd_samples_like_the_reference(device: torch.device) -> None:
    """Equal in repeated runs, and among few rows."""
    whole = crowd(*SIZES[device.type])
    there = whole.to(device)
    tokens = sample_slots(*there)
    again = sample_slots(*there)
    assert tokens.tolist() == again.tolist()
    for num in FEW:
        assert sample_slots(*there.some(num)).tolist() == tokens[:num].tolist()
    adjusted, keys = whole.adjusted.numpy(), zip(whole.slots, whole.positions, strict=True)
    assert tokens.tolist() == [
        CODES.get(row) or expected_token(adjusted[row], whole.params, int(slot), int(position))
        for row, (slot, position) in enumerate(keys)
    ]


def test_each_row_of_a_crowd_keeps_like_the_reference(device: torch.device) -> None:
    """Equal in repeated runs, and among few rows. Tokens near a threshold of mass may differ."""
    whole = crowd(*SIZES[device.type])
    there = whole.to(device)
    arguments = (there.adjusted, there.params, there.slots)
    scores = process_slots(*arguments)
    assert scores.equal(process_slots(*arguments))
    for num in FEW:
        few = there.some(num)
        assert process_slots(few.adjusted, few.params, few.slots).equal(scores[:num])
    for row in range(0, len(scores), 5 if device.type == "cuda" else 1):
        if row == EMPTY:
            continue
        slot, found = int(whole.slots[row]), scores[row].cpu().numpy()
        adjusted = whole.adjusted[row].numpy()
        expected = expected_scores(adjusted, whole.params, slot)
        differs = found != expected
        assert (np.isneginf(found) != np.isneginf(expected))[differs].all(), "scores are exact"
        params = whole.params
        if params.top_p[slot] == 1 and params.min_p[slot] == 0 and params.top_n_sigma[slot] == 0:
            assert not differs.any()
        elif differs.any():
            shares = np.exp((adjusted - adjusted.max()) / params.temperature[slot].item())
            assert shares[differs].sum() < NEAR * max(1, shares.sum()), row


def test_each_row_of_a_crowd_has_the_logprobs_of_the_reference(device: torch.device) -> None:
    """Every number of likeliest tokens, and none. Equal in repeated runs, and among few rows."""
    num_rows, vocab_size = SIZES[device.type]
    rng, whole = np.random.default_rng(2), crowd(num_rows, vocab_size)
    kinds = [NO_LOGPROBS, *range(MAX_TOP + 1)]
    wants = torch.from_numpy(np.resize(kinds, num_rows).astype(np.int32))
    tokens = torch.from_numpy(rng.integers(0, vocab_size, num_rows))
    tokens[::7] = NOT_FINITE
    own = (whole.adjusted, tokens, wants, whole.slots)
    there = [each.to(device) for each in own]
    result = logprobs_slots(*there)
    of_rows = wants[whole.slots.long()]
    has_logprobs = of_rows != NO_LOGPROBS
    for part, again in zip(result, logprobs_slots(*there), strict=True):
        assert part.cpu()[has_logprobs].nan_to_num().equal(again.cpu()[has_logprobs].nan_to_num())
    for num in FEW:
        few = logprobs_slots(there[0][:num], there[1][:num], there[2], there[3][:num])
        for part, again in zip(result, few, strict=True):
            some = has_logprobs[:num]
            assert part.cpu()[:num][some].nan_to_num().equal(again.cpu()[some].nan_to_num())
    values, top_ids, ranks = (each.cpu() for each in result)
    for row in np.flatnonzero(has_logprobs):
        if row == EMPTY:
            assert ((top_ids[row] >= 0) & (top_ids[row] < vocab_size)).all()
            continue
        logits, token = whole.adjusted[row].numpy(), int(tokens[row])
        own_value, rank, top_values, ids = logprobs_row(logits, token, MAX_TOP)
        np.testing.assert_allclose(values[row, 1:], top_values, atol=TOLERANCE)
        assert top_ids[row].tolist() == ids
        if token >= 0:
            np.testing.assert_allclose(values[row, 0], own_value, atol=TOLERANCE)
            assert ranks[row] == rank
