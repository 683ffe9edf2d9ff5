"""The gated delta rule and Mamba-2's in native code: near float64, and the same bits in any
steps."""

import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.build import library_name
from kernels.cpu.delta import PackedDelta
from kernels.cpu.library import FOLDER, load_library, variants
from kernels.cpu.operators import Kind, Operator
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from kernels.delta.states import DeltaWeights, LayerStates, StateRows, States
from tests.kernels.deltas import (
    SHAPES,
    Compute,
    Part,
    Sequence,
    Shape,
    exact,
    random_parts,
    run,
)
from tests.services.worker.builds import each_variant

LENGTHS = (90, 1, 33, 16)


def program_of(library: NativeLibrary, shape: Shape, weights: DeltaWeights) -> NativeProgram:
    delta = PackedDelta(
        num_key_heads=shape.num_key_heads,
        key_dim=shape.key_dim,
        conv=weights.conv.T.contiguous(),
        rates=weights.decay.exp(),
        dt_bias=weights.dt_bias,
        norm=weights.norm,
        eps=weights.eps,
        scan=weights.scan,
    )
    sizes = shape.channels + shape.inner, shape.num_gates, shape.inner
    operator = Operator(
        kind=Kind.GATED_DELTA, source=0, second=1, out=2, size=sizes[0], delta=delta
    )
    buffers = [Buffer(size, torch.float32) for size in sizes]
    return NativeProgram(library, [operator], buffers, 2, 2)


def native(library: NativeLibrary, shape: Shape, weights: DeltaWeights) -> Compute:
    program = program_of(library, shape, weights)

    def compute(x: Tensor, gates: Tensor, layer: LayerStates, rows: StateRows) -> Tensor:
        return program.run([x, gates], states=States([layer], rows))

    return compute


class Case:
    """Sequences with states, and copies to compute them again."""

    def __init__(self, shape: Shape) -> None:
        num = len(LENGTHS)
        self.weights, self.states = shape.weights(), shape.states(2 * num, num)
        self.inputs = [shape.inputs(length) for length in LENGTHS]

    def run(
        self, compute: Compute, parts: list[list[Part]], numbers: tuple[int, ...] = (0, 1, 2, 3)
    ) -> tuple[list[Sequence], LayerStates]:
        states = LayerStates(*(each.clone() for each in self.states))
        sequences = [Sequence(*self.inputs[i], i, len(LENGTHS) + i) for i in numbers]
        run(compute, sequences, parts, states)
        return sequences, states


@each_variant
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_states_are_the_same_bits_in_any_steps_and_company(
    shape: Shape, variant: str
) -> None:
    """With drafts, accepted or refused, and without."""
    case = Case(shape)
    compute = native(NativeLibrary(load_library(variant), torch.float32, 2), shape, case.weights)
    whole, states = case.run(compute, [[Part(length)] for length in LENGTHS])
    for sequence in whole:
        found = exact(sequence.x, sequence.gates, case.weights, case.states, sequence.state)
        own = states.matrices[sequence.state], states.columns[sequence.state]
        for one, other in zip((sequence.outputs, *own), found, strict=True):
            torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=1e-4)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        parts = [[*random_parts(length, rng)] for length in LENGTHS]
        check(whole, states, *case.run(compute, parts))
    alone = case.run(compute, [[Part(1)] * LENGTHS[0]], (0,))
    check(whole, states, *alone)


def check(
    whole: list[Sequence], states: LayerStates, found: list[Sequence], others: LayerStates
) -> None:
    for sequence in found:
        assert torch.equal(sequence.outputs, whole[sequence.state].outputs)
        for number in (sequence.state, sequence.copy):
            assert torch.equal(others.matrices[number], states.matrices[number])
            assert torch.equal(others.columns[number], states.columns[number])


@each_variant
def test_a_copy_is_the_state_of_a_shorter_sequence(variant: str) -> None:
    shape = SHAPES[0]
    case = Case(shape)
    compute = native(NativeLibrary(load_library(variant), torch.float32, 1), shape, case.weights)
    (sequence, *_), states = case.run(compute, [[Part(length)] for length in LENGTHS])
    assert sequence.num_copied == 80
    _, shorter = case.run(compute, [[Part(80)]], (0,))
    assert torch.equal(shorter.matrices[0], states.matrices[sequence.copy])
    assert torch.equal(shorter.columns[0], states.columns[sequence.copy])


@each_variant
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]], ids=str)
def test_the_number_of_threads_changes_no_bit(shape: Shape, variant: str, tmp_path: Path) -> None:
    """A copy of the library has threads of its own."""
    case, results = Case(shape), []
    parts = [[*random_parts(length, np.random.default_rng(0))] for length in LENGTHS]
    for num_threads in (1, 3):
        path = shutil.copy(FOLDER / library_name(variant), tmp_path / f"{num_threads}.so")
        library = NativeLibrary(ctypes.CDLL(str(path)), torch.float32, num_threads)
        results.append(case.run(native(library, shape, case.weights), parts))
    check(*results[0], *results[1])


@each_variant
def test_gates_far_from_zero_forget_everything_or_nothing(variant: str) -> None:
    shape = SHAPES[0]
    weights, states = shape.weights(), shape.states(2, 1)
    before = LayerStates(*(each.clone() for each in states))
    compute = native(NativeLibrary(load_library(variant), torch.float32, 1), shape, weights)
    x, _ = shape.inputs(4)
    gates = torch.tensor([200.0, -200.0, 30.0, -20.0]).repeat(4, 2)
    sequence = Sequence(x, gates, 0, 1)
    run(compute, [sequence], [[Part(4)]], states)
    outputs, matrices, _ = exact(x, gates, weights, before, 0)
    torch.testing.assert_close(sequence.outputs.double(), outputs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.matrices[0].double(), matrices, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("matrices", lambda each: each[:, :1], "states"),
        ("kept", lambda each: each[:, :, 1:].contiguous(), "states"),
        ("columns", Tensor.double, "states are not float32"),
        ("matrices", lambda each: each.mT, "states are not float32, or not contiguous"),
    ],
)
def test_states_in_another_form_are_refused(part: str, change: Any, message: str) -> None:
    shape = Shape(1, 2, 16, 16, 4)
    weights, states = shape.weights(), shape.states(1, 1)
    compute = native(NativeLibrary(load_library(variants()[0]), torch.float32, 1), shape, weights)
    wrong = states._replace(**{part: change(getattr(states, part))})
    with pytest.raises(ValueError, match=message):
        run(compute, [Sequence(*shape.inputs(2), 0, 0)], [[Part(2)]], wrong)


def test_a_step_without_states_is_refused() -> None:
    shape = Shape(1, 2, 16, 16, 4)
    library = NativeLibrary(load_library(variants()[0]), torch.float32, 1)
    with pytest.raises(ValueError, match="needs states"):
        program_of(library, shape, shape.weights()).run([*shape.inputs(2)])
