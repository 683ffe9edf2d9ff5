"""Engines for GPUs, on a CPU, with layers in host memory."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from pydantic import ValidationError
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from kernels.programmatic_launch import waits
from services.worker.backends.torch_lm import TorchOps
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.device.offload import placement
from services.worker.engine.device.offload.offloaded import OffloadedLayers, num_bytes_of
from services.worker.layers.embedding import Embedding
from services.worker.layers.linear import Linear
from services.worker.machine.hardware import Memory
from services.worker.models.registry import read_model_config
from services.worker.weights.dummy import make_dummy
from services.worker.weights.load import load_model
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.checkpoints import random_prompts, save_mimo, save_qwen2
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_memory import allocated_peak

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU = torch.device("cpu")
GIB = 1 << 30
ALL = 1.0  # GiB, more than the models have
NUM_LAYERS = 7
NO_DRAFTS = {"method": "none"}  # the automatic number of drafts depends on times
EAGER: dict[str, Any] = {"enforce_eager": True}
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo")
    save_mimo(folder, num_hidden_layers=NUM_LAYERS)
    return folder


def gib_of(num_layers: float, folder: Path) -> float:
    """The GiB of this number of layers in float32."""
    model = make_dummy(read_model_config(folder), torch.float32, CPU)
    return num_layers * num_bytes_of(model.model.layers[0]) / GIB


def offloaded_of(engine: DeviceEngine) -> OffloadedLayers:
    offloaded = engine._segments.model.offloaded
    assert isinstance(offloaded, OffloadedLayers)
    return offloaded


def run(folder: Path, **settings: Any) -> tuple[DeviceEngine, scheduled.Run]:
    """At a high temperature even drafts of a random head are often accepted. Prompts take more than
    one step."""
    defaults: dict[str, Any] = {"max_num_batched_tokens": 24, "speculative_config": NO_DRAFTS}
    engine = make_engine(folder, "device", **(defaults | settings))
    params = [
        SamplingParams(seed=seed, temperature=6.0 * (seed % 2), max_tokens=12, logprobs=2)
        for seed in range(6)
    ]
    return engine, scheduled.run(engine, random_prompts(6), params)


def assert_same(found: scheduled.Run, wanted: scheduled.Run) -> None:
    assert found.texts == wanted.texts
    assert found.verified == wanted.verified
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert all((a == b).all() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("num_layers", "settings"),
    [
        (3, {"speculative_config": DRAFTS}),
        (4, {}),
        pytest.param(NUM_LAYERS, {"speculative_config": DRAFTS}, marks=pytest.mark.slow),
        (NUM_LAYERS, {**EAGER, "kv_cache_dtype": "int8"}),
    ],
    ids=str,
)
def test_texts_and_logprobs_are_the_same_bits(
    mimo: Path, num_layers: int, settings: dict[str, Any]
) -> None:
    engine, found = run(mimo, cpu_offload_gb=gib_of(num_layers, mimo), **settings)
    assert offloaded_of(engine).num_layers == num_layers
    _, wanted = run(mimo, **settings)
    assert_same(found, wanted)


@pytest.mark.parametrize(
    "quantization",
    [
        "wint4",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("wint8", "nf4", "fp8_block")),
    ],
)
def test_codes_made_at_the_start_are_offloaded(
    mimo: Path, tmp_path: Path, quantization: str
) -> None:
    """They come from the code cache, like the embeddings', which are not offloaded."""
    forms = {"quantization": quantization, "embedding_quantization": quantization, **EAGER}
    _, wanted = run(mimo, **forms)
    for _ in range(2):
        engine, found = run(mimo, **forms, quantization_cache=tmp_path, cpu_offload_gb=ALL)
        assert offloaded_of(engine).num_layers == NUM_LAYERS
        assert_same(found, wanted)


@pytest.mark.parametrize(
    "layout",
    [
        name if place == 0 else pytest.param(name, marks=pytest.mark.slow)
        for place, name in enumerate(LAYOUTS)
    ],
)
def test_codes_of_a_checkpoint_are_offloaded(mimo: Path, tmp_path: Path, layout: str) -> None:
    save_quantized(mimo, tmp_path, LAYOUTS[layout])
    _, wanted = run(tmp_path, **EAGER)
    engine, found = run(tmp_path, cpu_offload_gb=ALL, **EAGER)
    assert offloaded_of(engine).num_layers == NUM_LAYERS
    assert_same(found, wanted)


def test_random_weights_match_runs_without(mimo: Path) -> None:
    _, wanted = run(mimo, load_format="dummy", **EAGER)
    engine, found = run(mimo, load_format="dummy", cpu_offload_gb=ALL, **EAGER)
    assert offloaded_of(engine).num_layers == NUM_LAYERS
    assert_same(found, wanted)


def planned_weights() -> int:
    return int(REGISTRY.get_sample_value("shoal_memory_bytes", {"kind": "weights"}) or 0)


@pytest.mark.parametrize("num_layers", [3, NUM_LAYERS])
def test_the_plan_has_two_buffers_for_all_layers_on_the_host(mimo: Path, num_layers: int) -> None:
    make_engine(mimo, "device", **EAGER)
    without = planned_weights()
    make_engine(mimo, "device", cpu_offload_gb=gib_of(num_layers, mimo), **EAGER)
    layer = round(gib_of(1, mimo) * GIB)
    assert planned_weights() == pytest.approx(without - (num_layers - 2) * layer, abs=2048)


def test_the_log_tells_the_copies_of_a_step_and_their_time(
    mimo: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine = make_engine(mimo, "device", cpu_offload_gb=ALL)
    assert f"cpu-offload-gb: {NUM_LAYERS} of {NUM_LAYERS} layers are in host memory" in caplog.text
    assert "remedies: weights of 4 bits (quantization), more sequences in a step, a smaller" in (
        caplog.text
    )
    assert engine.copies_s > 0
    assert f"at most {1 / engine.copies_s:.3g} steps/s" in caplog.text


def loading_peak(load: Callable[[], object]) -> int:
    """Peak bytes allocated by torch, without arenas."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        load()
    return allocated_peak(watch)


@pytest.mark.parametrize("quantization", ["none", "wint4"])
def test_loading_has_one_layer_outside_of_the_hosts_arenas_and_the_buffers(
    tmp_path: Path, quantization: Any
) -> None:
    """Besides layers that are never offloaded."""
    save_qwen2(tmp_path, shard_size="10MB", num_hidden_layers=12)
    config = read_model_config(tmp_path)

    def load(host_bytes: int) -> Any:
        return load_model(
            *(tmp_path, config, torch.float32, CPU, lambda *_: None),
            quantization=quantization,
            host_bytes=host_bytes,
        )

    layers = load(0).model.layers
    layer_bytes = num_bytes_of(layers[0])
    largest = max(linear.inputs * linear.outputs * 4 for linear in linears(layers))
    saved = loading_peak(lambda: load(0)) - loading_peak(lambda: load(GIB))
    assert saved >= (12 - 3) * layer_bytes - largest


def linears(layers: torch.nn.ModuleList) -> list[Linear]:
    return [module for module in layers.modules() if isinstance(module, Linear)]


def test_too_small_an_offload_is_refused_with_the_least_useful_one(mimo: Path) -> None:
    with pytest.raises(ConfigError, match=r"cpu-offload-gb: 0.0.*2 of 7 layers.*set it above 0.0"):
        make_engine(mimo, "device", cpu_offload_gb=gib_of(2, mimo))


def test_a_model_of_two_layers_is_refused(tmp_path: Path) -> None:
    save_qwen2(tmp_path, num_hidden_layers=2)
    with pytest.raises(ConfigError, match=r"cpu-offload-gb: 1: .*2 of 2 layers.*leave it at 0"):
        make_engine(tmp_path, "device", cpu_offload_gb=1)


def test_more_than_the_host_has_is_refused(mimo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = round(gib_of(2.5, mimo) * GIB)
    monkeypatch.setattr(placement, "read_memory", lambda device: Memory(10 * GIB, free))
    with pytest.raises(ConfigError, match=r"cpu-offload-gb: 60: 7 of 7 layers .* are free"):
        make_engine(mimo, "device", cpu_offload_gb=60)


def test_no_launch_begins_early_beside_copies(mimo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in the engine with copied layers, in a process with both."""
    seen: list[bool] = []
    embed = TorchOps.embed

    def watched(ops: TorchOps, ids: Tensor, embedding: Embedding) -> Tensor:
        seen.append(waits())
        return embed(ops, ids, embedding)

    monkeypatch.setattr(TorchOps, "embed", watched)
    for offloaded in (ALL, 0.0, ALL):
        seen.clear()
        engine = make_engine(mimo, "device", cpu_offload_gb=offloaded, speculative_config=NO_DRAFTS)
        scheduled.run(engine, [[1, 2, 3]], SamplingParams(seed=0, max_tokens=2))
        assert set(seen) == {offloaded > 0}


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_workers_on_cpus_refuse_it(mimo: Path, kernels: str) -> None:
    with pytest.raises(ConfigError, match=r"cpu-offload-gb: 0\.5: supported on GPUs only"):
        make_engine(mimo, kernels, cpu_offload_gb=0.5)


def test_models_of_transformers_refuse_it(mimo: Path) -> None:
    with pytest.raises(ConfigError, match=r"cpu-offload-gb: 2 is for our own architectures"):
        make_engine(mimo, "device", cpu_offload_gb=2, model_impl="transformers")


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "some"])
def test_values_that_are_none_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "SHOAL_CPU_OFFLOAD_GB", value)
    with pytest.raises(ValidationError, match="cpu_offload_gb"):
        WorkerConfig()


def test_memory_that_cannot_be_pinned_costs_the_graphs(
    mimo: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = OffloadedLayers.__init__

    def unpinned(offloaded: OffloadedLayers, *arguments: Any) -> None:
        make(offloaded, *arguments)
        offloaded.why_not_pinned = "out of memory"

    monkeypatch.setattr(OffloadedLayers, "__init__", unpinned)
    engine, found = run(mimo, cpu_offload_gb=ALL)
    assert len(engine._graphs) == 0
    assert "cannot be pinned (out of memory): copies block the host" in caplog.text
    assert_same(found, run(mimo, **EAGER)[1])


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "some layers dense, a shared network, attention to latents": ("DeepseekV3ForCausalLM", {}),
    "in codes": ("Qwen3MoeForCausalLM", {"quantization": "wint4"}),
    "biases": ("GptOssForCausalLM", {}),
    "drafts": ("Glm4MoeForCausalLM", {"speculative_config": DRAFTS | {"method": "ngram"}}),
    "one layer in two": ("Ernie4_5_MoeForCausalLM", EAGER),
}


@pytest.mark.parametrize(
    "case",
    only([("in codes",)], EXPERTS),
)
def test_texts_with_experts_are_the_same_bits(tmp_path: Path, case: str) -> None:
    name, settings = EXPERTS[case]
    save_family(tmp_path, name)
    _, wanted = run(tmp_path, **settings)
    engine, found = run(tmp_path, cpu_offload_gb=ALL, **settings)
    assert offloaded_of(engine).num_layers == 4
    assert_same(found, wanted)


def test_dense_layers_before_experts_count_with_their_own_size(tmp_path: Path) -> None:
    """The first of the layers is smaller than the others, and all are spread evenly."""
    save_family(tmp_path, "DeepseekV3ForCausalLM", num_hidden_layers=8)
    layers = make_dummy(read_model_config(tmp_path), torch.float32, CPU).model.layers
    sizes = [num_bytes_of(layer) for layer in layers]
    assert sizes[0] < 0.8 * sizes[1]
    assert len(set(sizes[1:])) == 1
    for num in (4, 5, 8):
        wanted = sum(sizes[place] for place in placement.spread(num, 8))
        engine = make_engine(tmp_path, "device", cpu_offload_gb=wanted / GIB, **EAGER)
        assert offloaded_of(engine).num_layers == num


def test_experts_that_kernels_cannot_read_are_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "Qwen3MoeForCausalLM", moe_intermediate_size=20)
    message = r"cpu-offload-gb: 1: model\.layers\.0\.mlp: experts of \(64, 20\) outputs"
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path, "device", cpu_offload_gb=ALL)
