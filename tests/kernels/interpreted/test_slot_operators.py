"""What a step reads and writes of its slots, by Triton's kernels."""

import numpy as np
import pytest
import torch

from kernels.accept import accept, accept_with_torch
from kernels.decode_inputs import decode_inputs
from tests.kernels.slot_checks import (
    EOS_IDS,
    WIDTHS,
    check_accept,
    check_decode_inputs,
    check_draft_pairs,
    check_step_pairs,
    check_store_drafts,
    random_tokens,
)
from tests.kernels.slots import (
    BLOCK_SIZE,
    MAX_DRAFTS,
    NULL_BLOCK,
    assert_same,
    copied,
    random_rows,
    random_slots,
)

seeds = pytest.mark.parametrize("seed", range(6))
widths = pytest.mark.parametrize("width", WIDTHS)
NO_EOS = torch.empty(0, dtype=torch.int32)


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
@pytest.mark.parametrize("eos_ids", [EOS_IDS, NO_EOS], ids=["eos", "no eos"])
def test_drafts_are_declared_right_by_the_coins_of_torch(seed: int, eos_ids: torch.Tensor) -> None:
    rng = np.random.default_rng(seed)
    width = MAX_DRAFTS + 1
    state, (slots, depths) = random_slots(rng), random_rows(rng, width)
    nums = decode_inputs(state, slots, depths, width, BLOCK_SIZE, NULL_BLOCK).num_valid
    tokens = random_tokens(rng, state, slots.tolist(), width)
    wanted_state = copied(state)
    wanted = accept_with_torch(
        wanted_state, slots, nums, tokens, eos_ids, acceptance=torch.tensor([0.5])
    )
    found = accept(state, slots, nums, tokens, eos_ids, acceptance=torch.tensor([0.5]))
    for name, value in found._asdict().items():
        torch.testing.assert_close(value, getattr(wanted, name), rtol=0, atol=0, msg=name)
    assert_same(state, wanted_state)
