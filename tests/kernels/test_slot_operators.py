"""What a step reads and writes of its slots, against loops over rows."""

import numpy as np
import pytest
import torch

from kernels.accept import accept
from kernels.accept.reference import accept_row
from kernels.decode_inputs import decode_inputs
from kernels.decode_inputs.reference import decode_inputs as decode_inputs_slowly
from kernels.mtp_inputs import Pairs, draft_pairs, step_pairs
from kernels.mtp_inputs.reference import draft_row, step_row
from kernels.sample import NOT_FINITE, NOTHING_LEFT
from kernels.slot_state import SlotState
from kernels.store_drafts import store_drafts
from kernels.store_drafts.reference import store_draft
from tests.kernels.slots import (
    BLOCK_SIZE,
    MAX_DRAFTS,
    NULL_BLOCK,
    VOCAB_SIZE,
    assert_same,
    copied,
    random_rows,
    random_slots,
)

EOS_IDS = torch.tensor([3], dtype=torch.int32)
SEEDS = range(40)
WIDTHS = range(1, MAX_DRAFTS + 2)


def random_tokens(
    rng: np.random.Generator, state: SlotState, slots: list[int], width: int
) -> torch.Tensor:
    """Often what was drafted, sometimes wrong."""
    tokens = torch.from_numpy(rng.integers(0, VOCAB_SIZE, (len(slots), width)))
    is_drafted = torch.from_numpy(rng.random((len(slots), width - 1)) < 0.7)
    drafts = state.ids[slots, 1:width].long()
    tokens[:, :-1] = torch.where(is_drafted, drafts, tokens[:, :-1])
    tokens[torch.from_numpy(rng.random(tokens.shape) < 0.05)] = NOT_FINITE
    tokens[torch.from_numpy(rng.random(tokens.shape) < 0.05)] = NOTHING_LEFT
    return tokens


def random_drafts(rng: np.random.Generator, num: int) -> tuple[torch.Tensor, ...]:
    """Counts, tokens, logprobs and ranks."""
    counts, tokens = rng.integers(0, 3, num), rng.integers(-1, VOCAB_SIZE, num)
    logprobs, ranks = -rng.random(num, np.float32), rng.integers(1, 9, num)
    arrays = (counts.astype(np.int32), tokens, logprobs, ranks.astype(np.int32))
    return tuple(torch.from_numpy(each) for each in arrays)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_that_decode_put_their_last_id_and_their_drafts_in(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    state, rows = random_slots(rng), random_rows(rng, width)
    found = decode_inputs(state, *rows, width, BLOCK_SIZE, NULL_BLOCK)
    wanted = decode_inputs_slowly(state, *rows, width, BLOCK_SIZE, NULL_BLOCK)
    for name, value in found._asdict().items():
        torch.testing.assert_close(value, getattr(wanted, name), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_are_accepted_as_row_by_row(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    state, (slots, depths) = random_slots(rng), random_rows(rng, width)
    nums = decode_inputs(state, slots, depths, width, BLOCK_SIZE, NULL_BLOCK).num_valid
    tokens = random_tokens(rng, state, slots.tolist(), width)
    wanted_state = copied(state)
    wanted = [
        accept_row(wanted_state, slot, num, row, EOS_IDS)
        for slot, num, row in zip(slots.tolist(), nums.tolist(), tokens.tolist(), strict=True)
    ]
    found = accept(state, slots, nums, tokens, EOS_IDS)
    columns = (found.num_emitted.tolist(), found.num_accepted.tolist(), found.codes.tolist())
    assert list(zip(*columns, strict=True)) == wanted
    assert_same(state, wanted_state)


@pytest.mark.parametrize("seed", SEEDS)
def test_drafts_are_stored_where_there_is_room(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, (slots, _) = random_slots(rng), random_rows(rng, 1)
    wanted = copied(state)
    for _ in range(MAX_DRAFTS):
        drafts = random_drafts(rng, len(slots))
        store_drafts(state, slots, *drafts)
        for slot, *row in zip(slots.tolist(), *(each.tolist() for each in drafts), strict=True):
            store_draft(wanted, slot, *row)
    assert_same(state, wanted)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_pairs_of_a_step_follow_its_tokens(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    state, (slots, depths) = random_slots(rng), random_rows(rng, width)
    inputs = decode_inputs(state, slots, depths, width, BLOCK_SIZE, NULL_BLOCK)
    tokens = random_tokens(rng, state, slots.tolist(), width)
    accept(state, slots, inputs.num_valid, tokens, EOS_IDS)
    wanted_state = copied(state)
    rows = zip(
        *(each.tolist() for each in (slots, inputs.starts, inputs.num_valid, tokens)), strict=True
    )
    wanted = [step_row(wanted_state, *row, BLOCK_SIZE, NULL_BLOCK) for row in rows]
    found = step_pairs(
        state, slots, inputs.starts, inputs.num_valid, tokens, BLOCK_SIZE, NULL_BLOCK
    )
    pairs = [pair for row, _, _ in wanted for pair in row]
    assert _as_pairs(found) == pairs
    assert found.starts.tolist() == [first for _, first, _ in wanted]
    assert found.first_keys.tolist() == [seen for _, _, seen in wanted]
    assert_same(state, wanted_state)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pair_more_is_that_of_the_last_draft(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, (slots, _) = random_slots(rng), random_rows(rng, 1)
    wanted = [draft_row(state, slot, BLOCK_SIZE, NULL_BLOCK) for slot in slots.tolist()]
    found = draft_pairs(state, slots, BLOCK_SIZE, NULL_BLOCK)
    assert _as_pairs(found) == [pair for pair, _, _ in wanted]
    assert found.starts.tolist() == [first for _, first, _ in wanted]
    assert found.first_keys.tolist() == [seen for _, _, seen in wanted]


def _as_pairs(found: Pairs) -> list[tuple[int, ...]]:
    columns = (found.input_ids, found.positions, found.places)
    return list(zip(*(column.tolist() for column in columns), strict=True))


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
        accepted = accept(state, slots, nums, tokens, EOS_IDS, acceptance=0.8)
        num_right += int(accepted.num_accepted.sum())
        num_rows += int((nums > 0).sum())
    assert num_right / num_rows == pytest.approx(0.8, abs=0.04)
