"""What a step reads and writes of its slots."""

import numpy as np
import pytest
import torch

from kernels.accept import accept
from kernels.coins import PURPOSE_ACCEPT
from kernels.coins.reference import coins as coins_slowly
from tests.kernels.slot_checks import (
    EOS_IDS,
    WIDTHS,
    check_accept,
    check_decode_inputs,
    check_draft_pairs,
    check_step_pairs,
    check_store_drafts,
)
from tests.kernels.slots import VOCAB_SIZE, random_rows, random_slots

seeds = pytest.mark.parametrize("seed", range(40))
widths = pytest.mark.parametrize("width", WIDTHS)


@seeds
@widths
def test_rows_that_decode_put_their_last_id_and_their_drafts_in(seed: int, width: int) -> None:
    check_decode_inputs(seed, width)


@seeds
@widths
def test_tokens_are_accepted_as_row_by_row(seed: int, width: int) -> None:
    check_accept(seed, width)


@seeds
def test_drafts_are_stored_where_there_is_room(seed: int) -> None:
    check_store_drafts(seed)


@seeds
@widths
def test_the_pairs_of_a_step_follow_its_tokens(seed: int, width: int) -> None:
    check_step_pairs(seed, width)


@seeds
def test_a_pair_more_is_that_of_the_last_draft(seed: int) -> None:
    check_draft_pairs(seed)


@seeds
def test_drafts_are_declared_right_by_coins_of_their_positions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, (slots, _) = random_slots(rng), random_rows(rng, 2)
    rows = slots.long()
    state.ends.fill_(1000)
    state.stop_ids.fill_(-1)
    tokens = torch.full((len(slots), 2), VOCAB_SIZE)  # no draft, no end
    of_slots = (state.seeds, torch.zeros_like(state.seeds), state.num_tokens, state.choices)
    columns = (each[rows].numpy().astype(np.int64) for each in of_slots)
    is_right = (coins_slowly(*columns, PURPOSE_ACCEPT) >> np.uint64(8)) < 2**23
    nums = 2 * state.is_open[rows]
    accepted = accept(state, slots, nums, tokens, EOS_IDS, acceptance=torch.tensor([0.5]))
    assert accepted.num_accepted.tolist() == (is_right & (nums.numpy() > 0)).tolist()


def test_drafts_can_be_declared_right_as_often_as_a_measurement_wants() -> None:
    rng = np.random.default_rng(0)
    num_right = num_rows = 0
    for _ in range(400):
        state, (slots, _) = random_slots(rng), random_rows(rng, 2)
        state.num_drafts.fill_(1)
        state.ends.fill_(1000)
        nums = 2 * state.is_open[slots.long()]
        tokens = torch.full((len(slots), 2), VOCAB_SIZE)  # no draft, no end
        state.stop_ids.fill_(-1)
        accepted = accept(state, slots, nums, tokens, EOS_IDS, acceptance=torch.tensor([0.8]))
        num_right += int(accepted.num_accepted.sum())
        num_rows += int((nums > 0).sum())
    assert num_right / num_rows == pytest.approx(0.8, abs=0.04)
