"""Steps with prompts and graphed forward passes, padded to the graphs' tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.engines import make_engine
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.device.recorders import CaptureError
from services.worker.engine.device.trunk_graphs import RecordedTrunk, TrunkShape, trunk_shapes
from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig
from shared.wire.messages import ALL_TOKENS
from tests.services.worker.device.test_device_engine import (
    assert_same,
    launched_ahead,
    one_by_one,
    steps_of,
)

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

DEFAULTS = WorkerConfig()
FULL: dict[str, Any] = {"cudagraph_mode": "full", "cudagraph_capture_sizes": [1, 4, 6, 16]}
NUM_PROMPT_STEPS = 3  # of ``steps_of``


@pytest.fixture
def engine(checkpoint: Path) -> DeviceEngine:
    made = make_engine(checkpoint, "device", **FULL)
    assert isinstance(made, DeviceEngine)
    return made


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each graphed forward pass."""
    found: list[int] = []
    run = RecordedTrunk.run

    def counted(trunk: RecordedTrunk, *arguments: Any) -> torch.Tensor:
        found.append(len(trunk._input_ids))
        return run(trunk, *arguments)

    monkeypatch.setattr(RecordedTrunk, "run", counted)
    return found


def test_sizes_are_numbers_of_tokens() -> None:
    assert trunk_shapes([1, 4, 64], max_tokens=48, max_drafts=3) == [(48, 4), (48, 1), (4, 1)]


def test_with_the_default_sizes_there_are_thirteen_at_most() -> None:
    assert len(trunk_shapes(DEFAULTS.cudagraph_capture_sizes, 8192, 0)) == 7
    assert len(trunk_shapes(DEFAULTS.cudagraph_capture_sizes, 8192, 3)) == 13


def test_prompts_are_in_no_graph_where_a_setting_says_so(checkpoint: Path) -> None:
    none: tuple[dict[str, Any], ...] = (
        {"cudagraph_mode": "full_decode_only"},
        {"enforce_eager": True},
    )
    for settings in none:
        assert not len(make_engine(checkpoint, "device", **settings)._trunks)


def test_few_tokens_are_not_padded_to_many() -> None:
    shape = TrunkShape(128, 4)
    assert not shape.takes(2, 2, 60)
    assert shape.takes(2, 2, 61)


@pytest.fixture(scope="module")
def drafting() -> DeviceEngine:
    return make_engine(
        EMBEDDED_MODEL,
        "device",
        max_model_len=64,
        max_num_seqs=4,
        speculative_config={"num_speculative_tokens": 3},
        cudagraph_mode="full",
        cudagraph_capture_sizes=[4, 16],
    )


@pytest.mark.parametrize(
    ("num_rows", "width", "num_chunk_tokens", "taken"),
    [
        (0, 1, 3, (4, 1)),
        (1, 1, 3, (4, 1)),
        (1, 2, 3, (16, 4)),
        (3, 1, 13, (16, 1)),
        (3, 4, 4, (16, 4)),
        (3, 4, 5, None),
        (0, 1, 17, None),
    ],
    ids=str,
)
def test_a_step_takes_the_smallest_that_has_room(
    drafting: DeviceEngine,
    num_rows: int,
    width: int,
    num_chunk_tokens: int,
    taken: tuple[int, int] | None,
) -> None:
    trunk = drafting._trunks.find(num_rows, width, num_chunk_tokens)
    found = None if trunk is None else TrunkShape(len(trunk._input_ids), trunk.width)
    assert found == taken


@pytest.mark.parametrize(
    "rules",
    [
        {"logprobs": 3},
        {"temperature": 0.9, "top_p": 0.8, "logprobs": ALL_TOKENS},
        {"prompt_logprobs": 2},
        {"prompt_logprobs": ALL_TOKENS, "presence_penalty": 2.0},
        {"bad_words": [[9], [11, 12]], "logprobs": 2},
    ],
    ids=str,
)
def test_recorded_forward_passes_match_eager_ones(
    checkpoint: Path, engine: DeviceEngine, replayed: list[int], rules: dict[str, Any]
) -> None:
    """Twice, to detect leftovers in a graph's tensors."""
    eager = make_engine(checkpoint, "device", enforce_eager=True)
    wanted = one_by_one(eager, steps_of(**rules))
    run = one_by_one if "bad_words" in rules else launched_ahead
    for _ in range(2):
        assert_same(run(engine, steps_of(**rules)), wanted)
        engine.reset()
    assert replayed == 2 * [16, 6, 6], "9, 6 and 5 tokens"


def test_padding_is_written_to_the_null_block_alone(checkpoint: Path, engine: DeviceEngine) -> None:
    eager = make_engine(checkpoint, "device", enforce_eager=True)
    for each in (engine, eager):
        one_by_one(each, steps_of())
    caches = engine._segments.kv_cache, eager._segments.kv_cache
    for found, wanted in zip(*(cache.layers for cache in caches), strict=True):
        np.testing.assert_allclose(found.entries[:-1], wanted.entries[:-1], atol=1e-5)
        assert found.entries.isfinite().all()


def test_there_may_be_more_padding_than_a_sequence_has_tokens(
    checkpoint: Path, replayed: list[int]
) -> None:
    short = make_engine(
        checkpoint, "device", max_model_len=40, **(FULL | {"cudagraph_capture_sizes": [64]})
    )
    wanted = one_by_one(make_engine(checkpoint, max_model_len=40), steps_of(logprobs=2))
    assert_same(launched_ahead(short, steps_of(logprobs=2)), wanted)
    assert replayed == [64, 64, 64]


def test_a_step_with_more_tokens_than_any_graph_runs_as_it_comes(
    checkpoint: Path, replayed: list[int]
) -> None:
    few = make_engine(checkpoint, "device", **(FULL | {"cudagraph_capture_sizes": [4, 6]}))
    wanted = one_by_one(make_engine(checkpoint), steps_of(logprobs=2))
    assert_same(launched_ahead(few, steps_of(logprobs=2)), wanted)
    assert replayed == [6, 6]


def test_a_failed_capture_names_the_setting_that_avoids_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(trunk: RecordedTrunk, record: Any) -> None:
        raise CaptureError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordedTrunk, "record", broken)
    with pytest.raises(ConfigError, match=r"^cudagraph-mode: .* full_decode_only leaves them out"):
        make_engine(checkpoint, "device", **FULL)


def test_where_memory_is_short_steps_with_prompts_run_as_they_come(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    replayed: list[int],
) -> None:
    record = RecordedTrunk.record

    def short(trunk: RecordedTrunk, recorder: Any) -> None:
        if len(trunk._input_ids) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. Process")
        record(trunk, recorder)

    monkeypatch.setattr(RecordedTrunk, "record", short)
    engine = make_engine(checkpoint, "device", **FULL)
    assert "none for steps with prompts of up to 16 tokens, which run eagerly" in caplog.text
    assert_same(launched_ahead(engine, steps_of()), one_by_one(make_engine(checkpoint), steps_of()))
    assert replayed == [6, 6]
