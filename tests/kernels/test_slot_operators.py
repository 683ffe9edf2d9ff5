"""Slot operators of a step, against loops over rows."""

from typing import Any

import numpy as np
import pytest
import torch

from kernels.accept import accept, accept_on_cpu
from kernels.accept.reference import accept_row
from kernels.decode_inputs import decode_inputs
from kernels.decode_inputs.inputs import DecodeInputs
from kernels.decode_inputs.reference import decode_inputs as decode_inputs_slowly
from kernels.dispatch import IS_INTERPRETED
from kernels.mtp_inputs import draft_pairs, step_pairs
from kernels.mtp_inputs.pairs import Pairs
from kernels.mtp_inputs.reference import Pair, draft_row, step_row, target_of
from kernels.random_bits import PURPOSE_ACCEPT
from kernels.random_bits.reference import random_bits as random_bits_slowly
from kernels.slot_state import SlotState
from kernels.store_drafts import store_drafts
from kernels.store_drafts.reference import store_draft
from tests.kernels.slots import (
    BLOCK_SIZE,
    MAX_DRAFTS,
    NULL_BLOCK,
    VOCAB_SIZE,
    Rows,
    assert_equal,
    assert_same,
    copied,
    moved,
    random_drafts,
    random_rows,
    random_slots,
    random_tokens,
)

EOS_IDS = torch.tensor([3, 7, 8], dtype=torch.int32)  # only the first is ever sampled
NO_EOS = torch.empty(0, dtype=torch.int32)
MANY = 40 if IS_INTERPRETED else 200
SIZES = [(0, 1), (0, 8), (0, MANY), *((seed, 12) for seed in range(4))]
widths = pytest.mark.parametrize("width", range(1, MAX_DRAFTS + 2))


def inputs_of(state: SlotState, rows: Rows, width: int) -> DecodeInputs:
    return decode_inputs(state, *rows, width, BLOCK_SIZE, NULL_BLOCK)


@widths
def test_rows_that_decode_put_their_last_id_and_their_drafts_in(
    device: torch.device, subtests: pytest.Subtests, width: int
) -> None:
    for seed, num_slots in SIZES:
        with subtests.test(seed=seed, num_slots=num_slots):
            rng = np.random.default_rng(seed)
            state = random_slots(rng, num_slots, num_groups=1 + seed % 3)
            rows = random_rows(rng, width, num_slots)
            wanted = decode_inputs_slowly(state, *rows, width, BLOCK_SIZE, NULL_BLOCK)
            there = Rows(*(each.to(device) for each in rows))
            found = inputs_of(copied(state, device), there, width)
            for name, value in found._asdict().items():
                assert_equal(value, getattr(wanted, name), name)


@widths
def test_tokens_are_accepted_as_row_by_row(
    device: torch.device, subtests: pytest.Subtests, width: int
) -> None:
    for seed, num_slots in SIZES:
        with subtests.test(seed=seed, num_slots=num_slots):
            rng = np.random.default_rng(seed)
            state, rows = random_slots(rng, num_slots), random_rows(rng, width, num_slots)
            slots = rows.slots.tolist()
            nums = decode_inputs_slowly(state, *rows, width, BLOCK_SIZE, NULL_BLOCK).num_valid
            tokens = random_tokens(rng, state, slots, width)
            drafts = state.ids[slots, 1:width]
            on_device = copied(state, device)
            wanted = [
                accept_row(state, slot, num, row, EOS_IDS)
                for slot, num, row in zip(slots, nums.tolist(), tokens.tolist(), strict=True)
            ]
            arguments = (rows.slots, nums, tokens, EOS_IDS)
            found = accept(on_device, *(moved(each, device) for each in arguments))
            columns = (found.num_emitted, found.num_accepted, found.codes)
            assert list(zip(*(column.tolist() for column in columns), strict=True)) == wanted
            assert_equal(found.drafts, drafts, "drafts")
            assert_same(on_device, state)


def test_drafts_are_stored_where_there_is_room(
    device: torch.device, subtests: pytest.Subtests
) -> None:
    for seed, num_slots in SIZES:
        with subtests.test(seed=seed, num_slots=num_slots):
            rng = np.random.default_rng(seed)
            state, (slots, _) = random_slots(rng, num_slots), random_rows(rng, 1, num_slots)
            on_device = copied(state, device)
            for _ in range(MAX_DRAFTS):
                drafts = random_drafts(rng, len(slots))
                store_drafts(on_device, slots.to(device), *(moved(each, device) for each in drafts))
                columns = (slots, *drafts)
                for row in zip(*(column.tolist() for column in columns), strict=True):
                    store_draft(state, *row)
            assert_same(on_device, state)


@widths
def test_the_pairs_of_a_step_follow_its_tokens(
    device: torch.device, subtests: pytest.Subtests, width: int
) -> None:
    for seed, num_slots in SIZES:
        with subtests.test(seed=seed, num_slots=num_slots):
            rng = np.random.default_rng(seed)
            state = random_slots(rng, num_slots, num_groups=1 + seed % 3)
            rows = random_rows(rng, width, num_slots)
            inputs = decode_inputs_slowly(state, *rows, width, BLOCK_SIZE, NULL_BLOCK)
            tokens = random_tokens(rng, state, rows.slots.tolist(), width)
            columns = (rows.slots, inputs.starts, inputs.num_valid, tokens)
            emitted = [
                accept_row(state, slot, num_valid, row, EOS_IDS)[0]
                for slot, _, num_valid, row in zip(
                    *(each.tolist() for each in columns), strict=True
                )
            ]
            on_device = copied(state, device)
            arguments = (*columns, torch.tensor(emitted, dtype=torch.int32))
            there: Any = [*(moved(each, device) for each in arguments), BLOCK_SIZE, NULL_BLOCK]
            found = step_pairs(on_device, *there)
            wanted = [
                step_row(state, slot, start, num_valid, row, BLOCK_SIZE, NULL_BLOCK)
                for slot, start, num_valid, row in zip(
                    *(each.tolist() for each in columns), strict=True
                )
            ]
            assert_pairs(found, [pair for row, _, _ in wanted for pair in row])
            assert found.starts.tolist() == [first for _, first, _ in wanted]
            assert found.first_keys.tolist() == [seen for _, _, seen in wanted]
            lasts = [row * width + max(num - 1, 0) for row, num in enumerate(emitted)]
            assert found.lasts.tolist() == lasts
            assert found.targets.tolist() == [target_of(state, int(slot)) for slot in rows.slots]
            assert found.counts.tolist() == emitted
            assert_same(on_device, state)


def test_a_pair_more_is_that_of_the_last_draft(
    device: torch.device, subtests: pytest.Subtests
) -> None:
    for seed, num_slots in SIZES:
        with subtests.test(seed=seed, num_slots=num_slots):
            rng = np.random.default_rng(seed)
            state = random_slots(rng, num_slots, num_groups=1 + seed % 3)
            slots, _ = random_rows(rng, 1, num_slots)
            wanted = [draft_row(state, slot, BLOCK_SIZE, NULL_BLOCK) for slot in slots.tolist()]
            found = draft_pairs(copied(state, device), slots.to(device), BLOCK_SIZE, NULL_BLOCK)
            assert_pairs(found, [pair for pair, _, _ in wanted])
            assert found.starts.tolist() == [first for _, first, _ in wanted]
            assert found.first_keys.tolist() == [seen for _, _, seen in wanted]
            assert found.lasts.tolist() == list(range(len(slots)))
            assert found.targets.tolist() == [target_of(state, int(slot)) for slot in slots]
            assert_equal(found.counts, state.num_drafts[slots.long()], "counts")


def assert_pairs(found: Pairs, wanted: list[Pair]) -> None:
    places = zip(*found.slot_mapping.tolist(), strict=True)
    columns = (found.input_ids.tolist(), found.positions.tolist(), places)
    assert list(zip(*columns, strict=True)) == wanted


@pytest.mark.parametrize("eos_ids", [EOS_IDS, NO_EOS], ids=["eos", "no eos"])
def test_drafts_are_declared_accepted_by_the_random_bits_of_torch(
    triton_device: torch.device, subtests: pytest.Subtests, eos_ids: torch.Tensor
) -> None:
    for seed, num_slots in SIZES:
        with subtests.test(seed=seed, num_slots=num_slots):
            rng, width = np.random.default_rng(seed), MAX_DRAFTS + 1
            state, rows = random_slots(rng, num_slots), random_rows(rng, width, num_slots)
            nums = decode_inputs_slowly(state, *rows, width, BLOCK_SIZE, NULL_BLOCK).num_valid
            tokens = random_tokens(rng, state, rows.slots.tolist(), width)
            on_device, acceptance = copied(state, triton_device), torch.tensor([0.5])
            arguments = (rows.slots, nums, tokens, eos_ids, acceptance)
            found = accept(on_device, *(moved(each, triton_device) for each in arguments))
            wanted = accept_on_cpu(state, *arguments)
            for name, value in found._asdict().items():
                assert_equal(value, getattr(wanted, name), name)
            assert_same(on_device, state)


def test_drafts_are_declared_accepted_by_random_bits_of_their_positions(
    device: torch.device, subtests: pytest.Subtests
) -> None:
    for seed in range(8):
        with subtests.test(seed=seed):
            rng = np.random.default_rng(seed)
            state, (slots, _) = random_slots(rng, 12), random_rows(rng, 2, 12)
            rows = slots.long()
            state.ends.fill_(1000)
            state.stop_ids.fill_(-1)
            tokens = torch.full((len(slots), 2), VOCAB_SIZE)  # no draft, no end
            sampling, num_tokens = state.sampling, state.num_tokens
            of_slots = (sampling.seeds, torch.zeros_like(num_tokens), num_tokens, sampling.choices)
            columns = [each[rows].numpy().astype(np.int64) for each in of_slots]
            drawn: Any = [*columns, PURPOSE_ACCEPT]
            is_right = (random_bits_slowly(*drawn) >> np.uint64(8)) < 2**23
            nums = 2 * state.is_open[rows]
            arguments = (slots, nums, tokens, EOS_IDS, torch.tensor([0.5]))
            accepted = accept(copied(state, device), *(each.to(device) for each in arguments))
            assert accepted.num_accepted.tolist() == (is_right & (nums.numpy() > 0)).tolist()


def test_drafts_can_be_declared_accepted_as_often_as_a_measurement_wants() -> None:
    rng = np.random.default_rng(0)
    num_right = num_rows = 0
    for _ in range(400):
        state, (slots, _) = random_slots(rng, 12), random_rows(rng, 2, 12)
        state.num_drafts.fill_(1)
        state.ends.fill_(1000)
        nums = 2 * state.is_open[slots.long()]
        tokens = torch.full((len(slots), 2), VOCAB_SIZE)  # no draft, no end
        state.stop_ids.fill_(-1)
        accepted = accept(state, slots, nums, tokens, EOS_IDS, acceptance=torch.tensor([0.8]))
        num_right += int(accepted.num_accepted.sum())
        num_rows += int((nums > 0).sum())
    assert num_right / num_rows == pytest.approx(0.8, abs=0.04)
