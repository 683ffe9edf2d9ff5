"""Sequences with adapters under the scheduler: plans of several steps, drafts, preemption."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from benchmarks.harness.scheduled import Run
from services.worker.adapters.addition import make
from services.worker.adapters.sites import LoadedAdapter
from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig
from tests.services.worker.adapters.made import (
    DIGESTS,
    adapters_of,
    engine_with,
    make_adapter,
    shapes_of,
)
from tests.services.worker.speculation import params_of, prompts

NUM = 8
OF_PROMPTS = [("", *DIGESTS[:3])[number % 4] for number in range(NUM)]


@cache
def made() -> list[LoadedAdapter]:
    shapes = shapes_of(EMBEDDED_MODEL, lambda site: True)  # the embedding and the head too
    return [make_adapter(shapes, digest, 16, strength=0.03) for digest in DIGESTS[:3]]


@cache
def engine(method: str, kernels: str = "native", **settings: Any) -> Any:
    speculation = {"method": method, "adaptive": False}
    options = {"max_model_len": 160, "max_num_seqs": 32, "max_loras": 3, **settings}
    return engine_with(EMBEDDED_MODEL, kernels, made(), speculative_config=speculation, **options)


def run(method: str, num_steps: int, **options: Any) -> Run:
    some, params = prompts()[12 : 12 + NUM], params_of(0.7, NUM, logprobs=3)
    return scheduled.run(
        engine(method), some, params, num_steps=num_steps, adapters=OF_PROMPTS, **options
    )


@cache
def single() -> Run:
    return run("none", 1)


@pytest.mark.parametrize("num_steps", [pytest.param(2, marks=pytest.mark.slow), 16])
def test_plans_of_several_steps_give_the_same_bits(num_steps: int) -> None:
    """With logprobs, and without, where native code runs the steps by itself."""
    several = run("none", num_steps)
    assert several.num_long_plans > 0
    assert several.texts == single().texts
    assert several.ends == single().ends
    assert {*several.ends} == {"stop", "length"}
    for one, other in zip(several.logprobs, single().logprobs, strict=True):
        assert [each.tobytes() for each in one] == [each.tobytes() for each in other]
    some, params = prompts()[12 : 12 + NUM], params_of(0.7, NUM)
    plain = scheduled.run(engine("none"), some, params, num_steps=num_steps, adapters=OF_PROMPTS)
    assert plain.texts == single().texts


@pytest.mark.parametrize("method", ["mtp", pytest.param("ngram", marks=pytest.mark.slow)])
def test_drafts_without_adapters_are_verified_with_them(method: str) -> None:
    drafted = run(method, 3)
    assert drafted.num_accepted > 0
    assert drafted.texts == single().texts


def test_preempted_and_cached_sequences_keep_their_adapters() -> None:
    tight = engine("none", num_gpu_blocks_override=13, max_num_batched_tokens=20)
    some, params = prompts()[12 : 12 + NUM], params_of(0.7, NUM, logprobs=3)
    found = scheduled.run(
        tight, some * 2, params * 2, adapters=OF_PROMPTS * 2, caches_prefixes=True, num_steps=4
    )
    assert found.num_readmitted > 0
    assert found.num_hits > 0
    assert found.texts == single().texts * 2


def test_adapters_change_texts() -> None:
    plain = scheduled.run(engine("none"), prompts()[12 : 12 + NUM], params_of(0.7, NUM))
    pairs = zip(plain.texts, single().texts, OF_PROMPTS, strict=True)
    assert [one == other for one, other, _ in pairs] == [not each for each in OF_PROMPTS]


def test_the_capacity_and_the_memory_count_adapters(checkpoint: Path) -> None:
    one = engine_with(checkpoint, "native", max_loras=5)
    found = adapters_of(one)
    assert one.capacity.max_adapters == 5
    purposes = found.num_bytes(512)
    assert [*purposes] == [
        "1 adapters of rank 64 (max-cpu-loras, max-lora-rank)",
        "loading an adapter",
        "adapters in a step",
    ]
    found.table.add(make_adapter(shapes_of(checkpoint), DIGESTS[0], rank=64))
    (packed,) = found.table._adapters.values()
    assert packed.num_bytes == next(iter(purposes.values()))


def test_too_little_memory_names_the_settings(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"; 1024 adapters of rank 512 \(max-cpu-loras, max-lo"):
        make_engine(
            checkpoint, "native", enable_lora=True, max_cpu_loras=1024, max_lora_rank=512,
            gpu_memory_utilization=0.01,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"pipeline_parallel_size": 2}, "not supported with pipeline-parallel-size 2; set it to 1"),
        ({"runner": "pooling"}, "not supported for a model that pools"),
        ({"model_impl": "transformers"}, "our own architectures only; transformers computes this"),
    ],
)
def test_unsupported_combinations_are_refused(
    checkpoint: Path, settings: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=f"^enable-lora: adapters are .*{problem}"):
        make_engine(checkpoint, "torch", enable_lora=True, **settings)


def test_images_next_to_adapters_are_refused_on_gpus(tmp_path: Path) -> None:
    model = mock.Mock()
    model.model.rotary.table.device = torch.device("cuda")
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^enable-lora: .* images; set language-model-only"):
        make(WorkerConfig(enable_lora=True), tmp_path, model, torch.float32)
