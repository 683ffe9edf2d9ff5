"""gated_delta by Triton's kernels."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch

from kernels.delta import LayerStates
from tests.kernels import test_delta
from tests.kernels.deltas import INTERVAL, MOST_DRAFTS, SHAPES, Part, Sequence, Shape, run
from tests.kernels.test_delta import on_a_device
from tests.kernels.test_delta import (
    test_a_device_computes_like_the_reference as check_device,
)
from tests.kernels.test_delta import (
    test_a_state_is_copied_at_the_last_multiple_of_the_interval as check_copies,
)
from tests.kernels.test_delta import (
    test_outputs_and_states_match_float64_in_any_steps as check_outputs,
)

SMALL = Shape(1, 2, 16, 16, 3)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 2, 16, 16, 1),
        Shape(1, 1, 16, 16, 1, num_rotated=8),
        *(pytest.param(each, marks=pytest.mark.slow) for each in SHAPES),
    ],
    ids=str,
)
def test_outputs_and_states_match_float64(shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_delta, "LENGTHS", (37, 1, 16))
    check_outputs(shape, on_a_device)


def test_limits_hide_no_nan_of_a_gate() -> None:
    shape = Shape(1, 2, 16, 16, 3, scans=True)
    x, gates = shape.inputs(1)
    gates[0, 1] = torch.nan
    sequence = Sequence(x, gates, 0, 1)
    run(partial(on_a_device, shape.weights()), [sequence], [[Part(1)]], shape.states(2, 1))
    assert sequence.outputs.isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_device_computes_like_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    check_device(device, dtype)


@pytest.mark.slow
def test_a_state_is_copied() -> None:
    check_copies(on_a_device)


def parts_of(length: int, rng: np.random.Generator, *, is_whole: bool) -> Iterator[Part]:
    """A prompt cut at multiples of a chunk, and 12 tokens decoded with drafts or one by one."""
    prompt = length - 12
    ends = range(INTERVAL, prompt, INTERVAL)
    start = 0
    for end in (*(end for end in ends if not is_whole and rng.integers(0, 2)), prompt):
        yield Part(end - start)
        start = end
    while start < length:
        most = 0 if is_whole else max(0, min(MOST_DRAFTS, length - start - 2))
        num_accepted = int(rng.integers(0, most + 1))
        num_drafts = 0 if is_whole else int(rng.integers(num_accepted, MOST_DRAFTS + 1))
        yield Part(1, num_drafts, num_accepted)
        start += 1 + num_accepted


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_cuts_drafts_and_neighbours_change_no_bit() -> None:
    """Of outputs, states and copies."""
    shape, lengths = SMALL, (85, 13, 60, 28)
    num = len(lengths)
    weights, inputs = shape.weights(), [shape.inputs(size) for size in lengths]
    states, rng = shape.states(2 * num, num), np.random.default_rng(3)
    found, expected = (LayerStates(*(each.clone() for each in states)) for _ in range(2))
    cut = [Sequence(*each, i, num + i) for i, each in enumerate(inputs)]
    parts = [[*parts_of(size, rng, is_whole=False)] for size in lengths]
    run(partial(on_a_device, weights), cut, parts, found)
    for i, each in enumerate(inputs):
        whole = Sequence(*each, i, num + i)
        parts = [[*parts_of(lengths[i], rng, is_whole=True)]]
        run(partial(on_a_device, weights), [whole], parts, expected)
        assert torch.equal(cut[i].outputs, whole.outputs)
    assert torch.equal(found.columns, expected.columns)
    assert torch.equal(found.matrices, expected.matrices)
