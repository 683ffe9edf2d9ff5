"""What a step reads and writes of its slots, against loops over rows."""

import numpy as np
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

EOS_IDS = torch.tensor([3, 7, 8], dtype=torch.int32)  # only the first of them is ever drawn
WIDTHS = range(1, MAX_DRAFTS + 2)


def random_tokens(
    rng: np.random.Generator, state: SlotState, slots: list[int], width: int
) -> torch.Tensor:
    """[R, w] of a wider tensor: often what was drafted, sometimes wrong."""
    tokens = torch.from_numpy(rng.integers(0, VOCAB_SIZE, (len(slots), width + 2)))[:, 1:-1]
    is_drafted = torch.from_numpy(rng.random((len(slots), width - 1)) < 0.7)
    drafts = state.ids[slots, 1:width].long()
    tokens[:, :-1] = torch.where(is_drafted, drafts, tokens[:, :-1])
    tokens[torch.from_numpy(rng.random(tokens.shape) < 0.05)] = NOT_FINITE
    tokens[torch.from_numpy(rng.random(tokens.shape) < 0.05)] = NOTHING_LEFT
    return tokens


def random_drafts(rng: np.random.Generator, num: int) -> tuple[torch.Tensor, ...]:
    """Counts, tokens, logprobs, which are a column of more, and ranks."""
    counts, tokens = rng.integers(0, 3, num), rng.integers(-1, VOCAB_SIZE, num)
    logprobs, ranks = np.log(rng.random((num, 3), np.float32))[:, 0], rng.integers(1, 9, num)
    arrays = (counts.astype(np.int32), tokens, logprobs, ranks.astype(np.int32))
    return tuple(torch.from_numpy(each) for each in arrays)


def check_decode_inputs(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    state, rows = random_slots(rng), random_rows(rng, width)
    found = decode_inputs(state, *rows, width, BLOCK_SIZE, NULL_BLOCK)
    wanted = decode_inputs_slowly(state, *rows, width, BLOCK_SIZE, NULL_BLOCK)
    for name, value in found._asdict().items():
        torch.testing.assert_close(value, getattr(wanted, name), rtol=0, atol=0, msg=name)


def check_accept(seed: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    state, (slots, depths) = random_slots(rng), random_rows(rng, width)
    nums = decode_inputs(state, slots, depths, width, BLOCK_SIZE, NULL_BLOCK).num_valid
    tokens = random_tokens(rng, state, slots.tolist(), width)
    drafts = state.ids[slots.long(), 1:width]
    wanted_state = copied(state)
    wanted = [
        accept_row(wanted_state, slot, num, row, EOS_IDS)
        for slot, num, row in zip(slots.tolist(), nums.tolist(), tokens.tolist(), strict=True)
    ]
    found = accept(state, slots, nums, tokens, EOS_IDS)
    columns = (found.num_emitted.tolist(), found.num_accepted.tolist(), found.codes.tolist())
    assert list(zip(*columns, strict=True)) == wanted
    torch.testing.assert_close(found.drafts, drafts, rtol=0, atol=0)
    assert_same(state, wanted_state)


def check_store_drafts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    state, (slots, _) = random_slots(rng), random_rows(rng, 1)
    wanted = copied(state)
    for _ in range(MAX_DRAFTS):
        drafts = random_drafts(rng, len(slots))
        store_drafts(state, slots, *drafts)
        for slot, *row in zip(slots.tolist(), *(each.tolist() for each in drafts), strict=True):
            store_draft(wanted, slot, *row)
    assert_same(state, wanted)


def check_step_pairs(seed: int, width: int) -> None:
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


def check_draft_pairs(seed: int) -> None:
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
