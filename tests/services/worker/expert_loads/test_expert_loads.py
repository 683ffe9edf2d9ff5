"""Tokens per expert, counted by every engine, and their metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from transformers import DeepseekV3ForCausalLM, Qwen2ForCausalLM

from benchmarks.harness.engines import make_engine
from services.worker.expert_loads.loads import BOUNDS, MIN_TOKENS, ExpertLoads
from services.worker.metrics import EXPERT_LOADS
from shared.errors import ConfigError
from tests.services.worker.checkpoints import random_prompts, save_model
from tests.services.worker.driver import Driver, Job
from tests.services.worker.test_families import CASES
from tests.services.worker.test_native import EXPERTS, make_config, make_model

COUNTED: dict[str, Any] = {"enable_expert_distribution_metrics": True}
NUM_EXPERTS, NUM_CHOSEN, NUM_SPARSE = 8, 2, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    save_model(folder, DeepseekV3ForCausalLM, **CASES["deepseek v3, yarn"][1])
    return folder


def counted(folder: Path, kernels: str, **settings: Any) -> torch.Tensor:
    """Counts [layers, experts] of three outputs, with prompts in chunks."""
    engine = make_engine(folder, kernels, **COUNTED, **settings)
    jobs = [Job(prompt) for prompt in random_prompts(3)]
    texts = Driver(engine, chunk_sizes=(5, 11)).run(jobs)
    loads = EXPERT_LOADS.source
    assert isinstance(loads, ExpertLoads)
    num_tokens = sum(len(job.prompt) for job in jobs) + sum(len(text) - 1 for text in texts)
    assert loads._counts.sum(1).tolist() == [num_tokens * NUM_CHOSEN] * NUM_SPARSE
    return loads._counts


def test_every_engine_counts_the_same_tokens(folder: Path) -> None:
    """Padding tokens, in some steps of the device engine, are not counted."""
    wanted = counted(folder, "torch")
    assert torch.equal(wanted, counted(folder, "native"))
    assert torch.equal(wanted, counted(folder, "device"))
    assert torch.equal(wanted, counted(folder, "device", cudagraph_mode="full"))
    make_engine(folder)
    assert EXPERT_LOADS.source is None, "off by default"


def bucket(layers: str, bound: str) -> float | None:
    labels = {"layers": layers, "le": bound}
    return REGISTRY.get_sample_value("shoal_expert_load_bucket", labels)


def test_loads_are_observed_when_metrics_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's loads at once, as soon as there are enough tokens."""
    loads = ExpertLoads(make_model(make_config(EXPERTS), torch.float32), torch.device("cpu"))
    monkeypatch.setattr(EXPERT_LOADS, "source", loads)
    num_layers, num_experts = loads._counts.shape
    names = loads._names
    assert len(names) == num_layers, "so few are a group each"
    assert bucket(names[0], "+Inf") == 0
    loads._counts[0, 1:] = MIN_TOKENS
    assert bucket(names[0], "+Inf") == 0, "too few on average"
    loads._counts[0, 0] = MIN_TOKENS
    assert [bucket(names[0], each) for each in ("0.75", "1.0", "+Inf")] == [0, *[num_experts] * 2]
    assert bucket(names[1], "+Inf") == 0
    loads._counts[0, 0] += num_experts * MIN_TOKENS
    assert bucket(names[0], "0.0") == num_experts - 1, "no tokens since"
    below = max(bound for bound in BOUNDS if bound < num_experts)
    assert bucket(names[0], str(below)) == 2 * num_experts - 1
    assert bucket(names[0], "+Inf") == 2 * num_experts
    total = REGISTRY.get_sample_value("shoal_expert_load_sum", {"layers": names[0]})
    assert total == 2 * num_experts


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, Qwen2ForCausalLM)
    with pytest.raises(ConfigError, match=r"distribution-metrics: the model has no experts"):
        make_engine(tmp_path, **COUNTED)
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with pytest.raises(ConfigError, match=r"enable-expert-parallel: the model has no experts"):
        make_engine(tmp_path, **ranks)
    with pytest.raises(ConfigError, match=r"metrics is for our own architectures"):
        make_engine(tmp_path, **COUNTED, model_impl="transformers")
