"""States of slots and their copies, by the positions that they have seen."""

import numpy as np
import pytest
import torch

from services.worker.machine.state_pool import StatePool, StateSpec
from shared.wire.messages import Admit, Capacity, Keep, SamplingParams, StepPlan

SPEC = StateSpec(num_heads=2, key_dim=4, value_dim=8, width=3, channels=32, num_gates=4)
CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=512,
                    max_model_len=1024, num_speculative_tokens=3, num_states=3)  # fmt: skip


def pool() -> StatePool:
    return StatePool([SPEC, SPEC], CAPACITY, torch.device("cpu"))


def plan(*rows: Keep, admits: tuple[Admit, ...] = ()) -> StepPlan:
    return StepPlan(1, [], [*admits], [], [], [], rows=[*rows])


def admit(slot: int, num_cached: int = 0, start: int | None = None, to: int | None = None) -> Admit:
    row = (slot, "r", 1, 0, 0, 1000, 1000, num_cached, SamplingParams(seed=0), [0])
    return Admit(*row, from_state=start, to_state=to)


def run(states: StatePool, slot: int, start: int, num: int, num_drafts: int = 0) -> list[int]:
    """Marks the states as ``gated_delta`` does. Returns position, kept, seen and copy."""
    arrays = (np.array([each]) for each in (slot, start, num, num_drafts))
    rows = states.rows(*arrays)
    assert rows is not None
    end = start + num - num_drafts
    copied = end // rows.interval * rows.interval
    for layer in states.layers:
        layer.matrices[slot] = end
        if copied > rows.positions[0] and rows.copies[0] >= 0:
            layer.matrices[rows.copies[0]] = copied
    return [int(each[0]) for each in (rows.positions, rows.num_kept, rows.num_seen, rows.copies)]


def test_a_slot_begins_with_zeros_or_with_a_copy_of_its_ids() -> None:
    states = pool()
    states.apply(plan(admits=(admit(0, to=1),)))
    run(states, 0, 0, 130)
    states.apply(plan(Keep(0, 2), admits=(admit(1, 128, start=1), admit(2))))
    assert [float(each.matrices[1].max()) for each in states.layers] == [128, 128]
    assert float(states.layers[0].matrices[2].abs().max()) == 0
    run(states, 0, 130, 70)
    with pytest.raises(ValueError, match="slot 3 begins with 128 ids; state 2 is of 192"):
        states.apply(plan(admits=(admit(3, 128, start=2),)))
    with pytest.raises(ValueError, match="slot 3 begins with 64 ids; state None"):
        states.apply(plan(admits=(admit(3, 64),)))


def test_a_slot_awaits_a_copy_of_other_ids() -> None:
    """Without a step before it is loaded: ``positions`` say so."""
    states = pool()
    states.apply(plan(admits=(admit(0, to=1), admit(3, 64, start=2, to=2))))
    with pytest.raises(ValueError, match="the state of slot 3 was not loaded"):
        run(states, 3, 64, 1)
    with pytest.raises(ValueError, match="slot 1 begins with 64 ids; state 2 is of 0"):
        states.apply(plan(admits=(admit(1, 64, start=2, to=0),)))
    states.positions[[3, CAPACITY.max_num_seqs + 2]] = 64
    assert run(states, 3, 64, 1)[:3] == [64, 0, 0]
    states.apply(plan(admits=(admit(1, 64, start=2, to=0), admit(2, 64, start=2, to=2))))
    assert run(states, 2, 64, 1)[0] == 64, "the copy has the ids already"


def test_a_step_after_drafts_advances_over_the_accepted_ones() -> None:
    states = pool()
    states.apply(plan(admits=(admit(0),)))
    assert run(states, 0, 0, 10)[:3] == [0, 0, 0]
    assert run(states, 0, 10, 4, num_drafts=3)[:3] == [10, 0, 0]
    assert run(states, 0, 13, 4, num_drafts=3)[:3] == [11, 2, 0], "two drafts were accepted"
    assert run(states, 0, 13, 1)[:3] == [14, 0, 1], "the token is computed once more"
    states.note_more(np.array([0]), 5)
    assert run(states, 0, 19, 1)[:3] == [19, 0, 0]


def test_copies_have_places_behind_the_slots() -> None:
    states = pool()
    states.apply(plan(admits=(admit(0), admit(1, to=0))))
    assert run(states, 0, 0, 64)[3] == -1
    assert run(states, 1, 0, 64)[3] == CAPACITY.max_num_seqs


def test_a_model_without_states_has_no_rows() -> None:
    states = StatePool([], CAPACITY, torch.device("cpu"))
    states.apply(plan(admits=(admit(0, 64, start=0),)))
    assert states.rows(*(np.zeros(1, np.int64) for _ in range(4))) is None
