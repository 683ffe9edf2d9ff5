"""Random slots, as the operators that read and write them meet them."""

from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.slot_state import SlotState, empty_slots

NUM_SLOTS, MAX_DRAFTS, BLOCK_SIZE, MAX_BLOCKS, NULL_BLOCK = 12, 3, 4, 8, 40
VOCAB_SIZE = 5  # so that drafts are often right, and texts often end
MAX_LEN = MAX_BLOCKS * BLOCK_SIZE - 1


class Rows(NamedTuple):
    slots: Tensor  # [R] int32: some, and nobody's twice
    depths: Tensor  # [R] int32


def random_slots(rng: np.random.Generator) -> SlotState:
    state = empty_slots(
        NUM_SLOTS, MAX_DRAFTS, MAX_BLOCKS, NULL_BLOCK, max_stop_ids=3, device=torch.device("cpu")
    )
    some = slice(0, NUM_SLOTS)

    def fill(target: Tensor, low: int, high: int) -> None:
        drawn = rng.integers(low, high, target[some].shape)
        target[some] = torch.from_numpy(drawn).to(target.dtype)

    fill(state.ids, 0, VOCAB_SIZE)
    fill(state.num_tokens, 1, MAX_LEN - MAX_DRAFTS)
    fill(state.num_drafts, 0, MAX_DRAFTS + 1)
    state.ends[some] = state.num_tokens[some] + torch.from_numpy(rng.integers(1, 6, NUM_SLOTS))
    state.ends.clamp_(max=MAX_LEN)
    fill(state.is_open, 0, 5)
    state.is_open.clamp_(max=1)
    fill(state.block_tables, 0, NULL_BLOCK)
    fill(state.ignores_eos, 0, 2)
    fill(state.stop_ids, -1, 2 * VOCAB_SIZE)
    fill(state.seeds, -(2**62), 2**62)
    fill(state.choices, 0, 3)
    fill(state.mtp_starts, 1, 4)
    state.mtp_ends.copy_(torch.maximum(state.num_tokens - 1, state.mtp_starts))
    return state


def random_rows(rng: np.random.Generator, width: int) -> Rows:
    slots = rng.permutation(NUM_SLOTS)[: rng.integers(1, NUM_SLOTS)].tolist()
    slots += [NUM_SLOTS, NUM_SLOTS]
    depths = rng.integers(0, width, len(slots))
    return Rows(torch.tensor(slots, dtype=torch.int32), torch.from_numpy(depths).int())


def copied(state: SlotState) -> SlotState:
    return SlotState(*(getattr(state, field.name).clone() for field in fields(state)))


def assert_same(one: SlotState, other: SlotState) -> None:
    for field in fields(one):
        torch.testing.assert_close(
            getattr(one, field.name), getattr(other, field.name), rtol=0, atol=0, msg=field.name
        )
