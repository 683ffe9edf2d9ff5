"""gated_delta and its reference against float64, in any steps."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.delta import (
    DeltaWeights,
    DeviceRows,
    LayerStates,
    StateRows,
    gated_delta,
    reference,
)
from tests.kernels.deltas import (
    INTERVAL,
    SHAPES,
    Part,
    Sequence,
    Shape,
    exact,
    on_device,
    random_parts,
    run,
)

LENGTHS = (70, 1, 33, 16)
TENSORS = ("conv", "decay", "dt_bias", "norm")
TOLERANCE: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-4}


def computed(
    weights: DeltaWeights, x: Tensor, gates: Tensor, layer: LayerStates, rows: StateRows
) -> Tensor:
    return gated_delta(x, gates, weights, layer, rows)


def referred(
    weights: DeltaWeights, x: Tensor, gates: Tensor, layer: LayerStates, rows: StateRows
) -> Tensor:
    return reference.gated_delta(x, gates, weights, layer, rows)


def on_a_device(
    weights: DeltaWeights, x: Tensor, gates: Tensor, layer: LayerStates, rows: StateRows
) -> Tensor:
    def compute(x: Tensor, gates: Tensor, layer: LayerStates, rows: DeviceRows) -> Tensor:
        return gated_delta(x, gates, weights, layer, rows)

    return on_device(compute, x.device)(x, gates, layer, rows)


def sequences_of(shape: Shape) -> list[Sequence]:
    num = len(LENGTHS)
    return [Sequence(*shape.inputs(size), i, num + i) for i, size in enumerate(LENGTHS)]


@pytest.mark.parametrize("function", [computed, referred, on_a_device])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_states_match_float64_in_any_steps(shape: Shape, function: Any) -> None:
    rng, num = np.random.default_rng(0), len(LENGTHS)
    weights, states, sequences = shape.weights(), shape.states(2 * num, num), sequences_of(shape)
    before = LayerStates(*(each.clone() for each in states))
    parts = [[*random_parts(length, rng)] for length in LENGTHS]
    run(partial(function, weights), sequences, parts, states, TOLERANCE["atol"])
    for sequence in sequences:
        x, gates, state = sequence.x, sequence.gates, sequence.state
        outputs, matrices, columns = exact(x, gates, weights, before, state)
        torch.testing.assert_close(sequence.outputs.double(), outputs, **TOLERANCE)
        torch.testing.assert_close(states.matrices[state].double(), matrices, **TOLERANCE)
        torch.testing.assert_close(states.columns[state].double(), columns, **TOLERANCE)


@pytest.mark.parametrize("function", [computed, referred, on_a_device])
def test_a_state_is_copied_at_the_last_multiple_of_the_interval(function: Any) -> None:
    shape = SHAPES[0]
    weights, states, sequences = shape.weights(), shape.states(8, 4), sequences_of(shape)
    before = LayerStates(*(each.clone() for each in states))
    # 40 tokens pass two multiples; drafts of the next step pass a third one, and one is accepted.
    parts = [
        [Part(40), Part(7, 3, 1), Part(1, 2, 0)],
        [Part(1)],
        [Part(15, 2, 2), Part(1)],
        [Part(16)],
    ]
    run(partial(function, weights), sequences, parts, states)
    assert [sequence.num_copied for sequence in sequences] == [48, 0, 16, 16]
    for sequence in sequences:
        num, copy = sequence.num_copied, sequence.copy
        if not num:
            assert torch.equal(states.matrices[copy], before.matrices[copy])
            continue
        x, gates = sequence.x[:num], sequence.gates[:num]
        _, matrices, columns = exact(x, gates, weights, before, sequence.state)
        torch.testing.assert_close(states.matrices[copy].double(), matrices, **TOLERANCE)
        torch.testing.assert_close(states.columns[copy].double(), columns, **TOLERANCE)


def test_drafts_leave_no_trace_in_a_state() -> None:
    """Neither before a multiple of the interval nor at one."""
    shape = SHAPES[0]
    weights, states = shape.weights(), shape.states(2, 1)
    plain = LayerStates(*(each.clone() for each in states))
    x, gates = shape.inputs(INTERVAL + 2)
    nums = np.array([0]), np.array([INTERVAL - 1])
    rows = [
        StateRows(
            np.array([0, 2]), np.array([num]), nums[0], nums[1], nums[0], nums[0], np.array([1]), 16
        )
        for num in (1, 0)
    ]
    gated_delta(x[:2], gates[:2], weights, states, rows[0])
    gated_delta(x[:1], gates[:1], weights, plain, rows[1]._replace(starts=np.array([0, 1])))
    assert torch.equal(states.columns, plain.columns)
    torch.testing.assert_close(states.matrices, plain.matrices)
    kept = torch.cat([x[1, : shape.channels], gates[1]])
    assert torch.equal(states.kept[0, 0], kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_computes_like_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    """The states, too: of random steps with drafts, repeated tokens and copies."""
    shape, num = SHAPES[3], len(LENGTHS)
    weights, states = shape.weights(), shape.states(2 * num, num)
    rng = np.random.default_rng(1)
    parts = [[*random_parts(length, rng)] for length in LENGTHS]
    sequences, others = sequences_of(shape), sequences_of(shape)
    for each, other in zip(sequences, others, strict=True):
        each.x, each.gates = each.x.to(dtype), each.gates.to(dtype)
        other.x, other.gates = each.x, each.gates
    moved = LayerStates(*(each.to(device, copy=True) for each in states))
    tensors = {name: each.to(device) for name, each in weights._asdict().items() if name in TENSORS}
    of_device = weights._replace(**tensors)

    def compute(x: Tensor, gates: Tensor, layer: LayerStates, rows: DeviceRows) -> Tensor:
        return gated_delta(x, gates, of_device, layer, rows)

    torch.manual_seed(2)  # for refused drafts
    run(partial(referred, weights), sequences, parts, states)
    torch.manual_seed(2)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    run(on_device(compute, device), others, parts, moved, tolerance)
    rounding: dict[str, Any] = {"atol": tolerance, "rtol": tolerance}
    for each, other in zip(sequences, others, strict=True):
        torch.testing.assert_close(other.outputs.float(), each.outputs.float(), **rounding)
    torch.testing.assert_close(moved.matrices.cpu(), states.matrices, **TOLERANCE)
    assert torch.equal(moved.columns.cpu(), states.columns)
