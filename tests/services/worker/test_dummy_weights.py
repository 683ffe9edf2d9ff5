"""Measuring a model needs no weights."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.step_engine import run_step
from services.worker.engine.host import HostEngine
from services.worker.models.registry import read_model_config
from services.worker.weights.dummy import make_dummy
from services.worker.weights.online import Quantization
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Admit, Decode, Prefill, SamplingParams, StepPlan
from tests.services.worker.checkpoints import VOCAB_SIZE, save_mimo

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of a model, except its weights."""
    save_mimo(tmp_path)
    for file in weight_files(tmp_path):
        file.unlink()
    return tmp_path


def test_weights_are_the_same_every_time_and_of_the_shapes_of_the_model(folder: Path) -> None:
    config = read_model_config(folder)
    one, two = (dict(make_dummy(config, torch.bfloat16, CPU).named_parameters()) for _ in range(2))
    for name, parameter in one.items():
        assert torch.equal(parameter, two[name])
    norm = one["model.layers.0.input_layernorm.weight"]
    assert torch.equal(norm, torch.ones_like(norm))
    assert one["model.embed_tokens.weight.values"].float().std() == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("quantization", ["none", "wint8", "wint4"])
def test_an_engine_runs_on_them(folder: Path, quantization: Quantization) -> None:
    settings = WorkerConfig(
        model=str(folder),
        load_format="dummy",
        quantization=quantization,
        dtype="float32",
        device="cpu",
    )
    engine = HostEngine(settings, lambda text, fraction: None)
    params = SamplingParams(seed=1)
    admit = Admit(0, "r/0/0", 1, 0, 0, 3, 3, 0, params, [0])
    ids = np.array([1, 2, 3], np.int32)
    result, arrays = run_step(engine, StepPlan(0, [], [admit], [], [Prefill(0, 3)], []), ids)
    assert [row.run.num_tokens for row in result.rows] == [1]
    assert 0 <= arrays.ids[0] < VOCAB_SIZE
    result, _ = run_step(engine, StepPlan(1, [], [], [], [], [Decode(0)]), ids[:0])
    assert [row.run.num_tokens for row in result.rows] == [1]


def test_without_being_asked_for_they_are_not_made(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no file model\.safetensors"):
        HostEngine(WorkerConfig(model=str(folder), device="cpu"), lambda text, fraction: None)
