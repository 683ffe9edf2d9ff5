"""Random slots for the operators that read and write them."""

from dataclasses import fields
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.sample import NOT_COMPILED, NOT_FINITE, NOTHING_LEFT
from kernels.sample.slot_params import SlotParams
from kernels.sample.slot_rules import SlotRules
from kernels.slot_state import SlotState, empty_slots

MAX_DRAFTS, BLOCK_SIZE, MAX_BLOCKS, NULL_BLOCK = 3, 4, 8, 40
VOCAB_SIZE = 5  # so few that drafts are often right and outputs often end
MAX_LEN = MAX_BLOCKS * BLOCK_SIZE - 1


class Rows(NamedTuple):
    slots: Tensor  # [R] int32: some slots, and the null slot twice
    depths: Tensor  # [R] int32


def random_slots(rng: np.random.Generator, num_slots: int, num_groups: int = 1) -> SlotState:
    state = empty_slots(
        *(num_slots, 1 + VOCAB_SIZE, MAX_DRAFTS, num_groups, MAX_BLOCKS, NULL_BLOCK),
        max_stop_ids=3,
        device=torch.device("cpu"),
    )
    some = slice(0, num_slots)

    def fill(target: Tensor, low: int, high: int) -> None:
        drawn = rng.integers(low, high, target[some].shape)
        target[some] = torch.from_numpy(drawn).to(target.dtype)

    fill(state.ids, 0, VOCAB_SIZE)
    fill(state.num_tokens, 1, MAX_LEN - MAX_DRAFTS)
    fill(state.num_drafts, 0, MAX_DRAFTS + 1)
    state.ends[some] = state.num_tokens[some] + torch.from_numpy(rng.integers(1, 6, num_slots))
    state.ends.clamp_(max=MAX_LEN)
    fill(state.is_open, 0, 5)
    state.is_open.clamp_(max=1)
    for table in state.block_tables:
        fill(table, 0, NULL_BLOCK)
    fill(state.ignores_eos, 0, 2)
    fill(state.stop_ids, -1, 2 * VOCAB_SIZE)
    fill(state.sampling.seeds, -(2**62), 2**62)
    fill(state.sampling.choices, 0, 3)
    fill(state.rules.is_changed, 0, 2)
    fill(state.rules.seen, 0, 99)
    fill(state.mtp_starts, 1, 4)
    state.mtp_ends.copy_(torch.maximum(state.num_tokens - 1, state.mtp_starts))
    return state


def random_rows(rng: np.random.Generator, width: int, num_slots: int) -> Rows:
    slots = rng.permutation(num_slots)[: rng.integers((num_slots + 1) // 2, num_slots + 1)].tolist()
    slots += [num_slots, num_slots]
    depths = rng.integers(0, width, len(slots))
    return Rows(torch.tensor(slots, dtype=torch.int32), torch.from_numpy(depths).int())


def random_tokens(
    rng: np.random.Generator, state: SlotState, slots: list[int], width: int
) -> Tensor:
    """[R, w], a view of a wider tensor: often the drafts, sometimes errors."""
    tokens = torch.from_numpy(rng.integers(0, VOCAB_SIZE, (len(slots), width + 2)))[:, 1:-1]
    is_drafted = torch.from_numpy(rng.random((len(slots), width - 1)) < 0.7)
    drafts = state.ids[slots, 1:width].long()
    tokens[:, :-1] = torch.where(is_drafted, drafts, tokens[:, :-1])
    tokens[torch.from_numpy(rng.random(tokens.shape) < 0.05)] = NOT_FINITE
    tokens[torch.from_numpy(rng.random(tokens.shape) < 0.05)] = NOTHING_LEFT
    tokens[torch.from_numpy(rng.random(tokens.shape) < 0.05)] = NOT_COMPILED
    return tokens


def random_drafts(rng: np.random.Generator, num: int) -> tuple[Tensor, ...]:
    """Counts, tokens, logprobs (a column of a wider tensor), and ranks."""
    counts, tokens = rng.integers(0, 3, num), rng.integers(-1, VOCAB_SIZE, num)
    logprobs, ranks = np.log(rng.random((num, 3), np.float32))[:, 0], rng.integers(1, 9, num)
    arrays = (counts.astype(np.int32), tokens, logprobs, ranks.astype(np.int32))
    return tuple(torch.from_numpy(each) for each in arrays)


def moved(view: Tensor, device: torch.device) -> Tensor:
    """Moved with its strides."""
    there = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=device)
    return there.copy_(view)


def copied(state: SlotState, device: torch.device) -> SlotState:
    others = columns_of(state)
    there = {name: column.to(device, copy=True) for name, column in others.items()}
    sampling = SlotParams(*(there.pop(name) for name in SlotParams._fields))
    rules = SlotRules(*(there.pop(name) for name in SlotRules._fields))
    return SlotState(**there, sampling=sampling, rules=rules)


def columns_of(state: SlotState) -> dict[str, Tensor]:
    columns = {field.name: getattr(state, field.name) for field in fields(state)}
    groups = columns.pop("sampling")._asdict(), columns.pop("rules")._asdict()
    return columns | groups[0] | groups[1]


def assert_same(found: SlotState, wanted: SlotState) -> None:
    others = columns_of(wanted)
    for name, column in columns_of(found).items():
        assert_equal(column, others[name], name)


def assert_equal(found: Tensor, wanted: Tensor, name: str) -> None:
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0, msg=name)
