"""The decode steps captured as graphs, and the graph of a step."""

import numpy as np
import pytest
import torch

from benchmarks.harness.engines import make_engine
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.device.graphs import Shape, shapes
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig

DEFAULT_SIZES = WorkerConfig().cudagraph_capture_sizes


def test_each_size_has_no_draft_and_all_of_them() -> None:
    found = shapes([1, 8, 64], max_rows=64, max_tokens=8192, max_drafts=3)
    assert found == [(64, 4), (64, 1), (8, 4), (8, 1), (1, 4), (1, 1)]


def test_without_drafts_there_is_one_shape_of_each_size() -> None:
    assert shapes([2, 4], 4, 512, max_drafts=0) == [(4, 1), (2, 1)]


def test_sizes_end_at_the_sequences_and_tokens_that_a_step_may_have() -> None:
    found = shapes([1, 16, 32], max_rows=20, max_tokens=50, max_drafts=3)
    assert found == [(20, 1), (16, 1), (1, 4), (1, 1)]


@pytest.mark.parametrize("max_num_seqs", [128, 1024])
def test_sixty_graphs_are_captured_at_most(max_num_seqs: int) -> None:
    """Forward, judge and first draft of each shape; later drafts depend on the rows only."""
    found = shapes(DEFAULT_SIZES, max_num_seqs, 8192, 3)
    assert 3 * len(found) + len({shape.num_rows for shape in found}) <= 60


def test_a_next_draft_is_recorded_once_for_each_number_of_rows(engine: DeviceEngine) -> None:
    steps = engine._graphs._steps
    for num_rows in (1, 2, 8):
        narrow, wide = steps[Shape(num_rows, 1)], steps[Shape(num_rows, 4)]
        assert narrow.next_draft is not None
        assert narrow.next_draft == wide.next_draft


@pytest.fixture(scope="module")
def engine() -> DeviceEngine:
    made = make_engine(
        EMBEDDED_MODEL,
        "device",
        max_model_len=64,
        max_num_seqs=8,
        cudagraph_capture_sizes=[1, 2, 8],
        speculative_config={"num_speculative_tokens": 3},
    )
    assert isinstance(made, DeviceEngine)
    return made


@torch.inference_mode()
@pytest.mark.parametrize(
    ("num_rows", "depth", "taken"),
    [
        (1, 0, (1, 1)),
        (1, 1, (1, 4)),
        (1, 2, (1, 4)),
        (3, 0, (8, 1)),
        (8, 3, (8, 4)),
        (2, 3, (2, 4)),
    ],
    ids=str,
)
def test_a_step_takes_the_next_larger_shape(
    engine: DeviceEngine, num_rows: int, depth: int, taken: Shape
) -> None:
    step = engine._graphs.find(np.arange(num_rows), np.full(num_rows, depth))
    assert step is not None
    assert (len(step.slots), step.width) == taken
    null_slot = engine.capacity.max_num_seqs
    padding = [null_slot] * (taken[0] - num_rows)
    assert step.slots.tolist() == [*range(num_rows), *padding]


def test_a_step_that_no_shape_fits_is_not_found(engine: DeviceEngine) -> None:
    assert engine._graphs.find(np.arange(8), np.full(8, 4)) is None


def test_eager_engines_capture_none() -> None:
    eager = make_engine(
        EMBEDDED_MODEL, "device", max_model_len=64, max_num_seqs=2, enforce_eager=True
    )
    assert isinstance(eager, DeviceEngine)
    assert len(eager._graphs) == 0
