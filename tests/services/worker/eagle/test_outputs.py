"""Outputs with drafts by an EAGLE-3 head are those without, and its drafts depend on the sequence
alone."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, KERNELS, AnyEngine, make_engine
from benchmarks.harness.scheduled import Run
from cli.plan.footprint import footprint_of
from services.worker.startup.plan_memory import weight_bytes
from shared.model_folder import weight_files
from shared.settings.worker import WorkerConfig
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.checkpoints import random_prompts, save_model
from tests.services.worker.eagle.checkpoints import change_tensors, save_head

NUM = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With its head in the folder ``head``, which drafts some tokens only."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, LlamaForCausalLM, initializer_range=0.02)
    save_head(folder / "head")
    return folder


def engine_of(model: Path, kernels: str, method: str = "eagle3", **settings: Any) -> AnyEngine:
    speculation = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "eagle3":
        speculation["model"] = str(model / "head")
    return make_engine(model, kernels, speculative_config=speculation, **settings)


def params_of(num: int = NUM) -> list[SamplingParams]:
    """At a high temperature even drafts of a random head are often right."""
    return [SamplingParams(seed=seed, temperature=6.0, max_tokens=24) for seed in range(num)]


@cache
def without(model: Path, **settings: Any) -> list[list[int]]:
    engine = engine_of(model, "native", "none", **settings)
    return scheduled.run(engine, random_prompts(NUM), params_of()).texts


def assert_same(found: Run, other: Run) -> None:
    assert found.texts == other.texts
    assert found.verified == other.verified


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [*((kernels, "float32") for kernels in ENGINES), ("native", "bfloat16")],
)
def test_texts_of_a_crowd_match_runs_without_drafts(model: Path, kernels: str, dtype: str) -> None:
    engine = engine_of(model, kernels, dtype=dtype)
    found = scheduled.run(engine, random_prompts(NUM), params_of())
    assert found.texts == without(model, dtype=dtype)
    assert found.num_accepted > 0


@pytest.mark.parametrize(
    ("kernels", "num_tokens"), only([("native", 1), ("native", 7)], KERNELS, [1, 7])
)
def test_texts_and_drafts_are_the_same_however_a_prompt_is_cut(
    model: Path, kernels: str, num_tokens: int
) -> None:
    """In steps of one token none is left for drafts."""
    whole = scheduled.run(engine_of(model, kernels), random_prompts(NUM), params_of(), max_open=1)
    cut = engine_of(model, kernels, max_num_batched_tokens=num_tokens)
    found = scheduled.run(cut, random_prompts(NUM), params_of(), max_open=1)
    assert found.texts == whole.texts == without(model)
    assert (found.num_accepted > 0) == (num_tokens > 1)
    if num_tokens > 1:
        assert found.verified == whole.verified


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_texts_and_drafts_are_the_same_whether_a_prompt_is_cached_or_not(
    model: Path, kernels: str
) -> None:
    twice = [each for prompt in random_prompts(NUM // 2) for each in (prompt * 2, prompt * 2)]
    engine = engine_of(model, kernels)
    cached = scheduled.run(engine, twice, params_of(), caches_prefixes=True, max_open=1)
    computed = scheduled.run(engine, twice, params_of(), max_open=1)
    assert cached.num_hits > 0
    assert cached.num_accepted > 0
    assert_same(cached, computed)


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_preempted_sequences_go_on_with_the_same_text(model: Path, kernels: str) -> None:
    num_blocks = 128 // ENGINES[kernels]["block_size"]
    tight = engine_of(model, kernels, max_model_len=96, num_gpu_blocks_override=num_blocks)
    squeezed = scheduled.run(tight, random_prompts(NUM), params_of(), caches_prefixes=True)
    assert squeezed.texts == without(model)
    assert squeezed.num_resumed > 0
    assert squeezed.num_accepted > 0


@pytest.mark.parametrize("kernels", only([("native",)], ENGINES))
def test_logprobs_of_prompts_and_outputs_match_runs_without_drafts(
    model: Path, kernels: str
) -> None:
    params = [replace(each, logprobs=3, prompt_logprobs=2) for each in params_of()]
    found = scheduled.run(engine_of(model, kernels), random_prompts(NUM), params)
    other = scheduled.run(engine_of(model, kernels, "none"), random_prompts(NUM), params)
    assert found.texts == other.texts
    assert found.num_accepted > 0
    for one, wanted in zip(found.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(wanted), atol=1e-4)
    assert found.scored.keys() == other.scored.keys() == {*range(1, NUM)}  # one prompt is one id
    for index in found.scored:
        drafting, plain = (np.concatenate(each.scored[index]) for each in (found, other))
        np.testing.assert_allclose(drafting, plain, atol=1e-4)


def test_a_copy_of_the_models_embeddings_takes_no_memory(model: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"method": "eagle3", "model": str(tmp_path)}
    save_head(tmp_path)
    without_copy = make_engine(model, speculative_config=settings)
    name = "model.embed_tokens.weight"
    tables = (load_file(file).get(name) for file in weight_files(model))
    (table,) = (each for each in tables if each is not None)
    change_tensors(tmp_path, embed_tokens__weight=table)
    with_copy = make_engine(model, speculative_config=settings)
    assert weight_bytes(with_copy._model) == weight_bytes(without_copy._model)
    change_tensors(tmp_path, embed_tokens__weight=table + 1)
    own = make_engine(model, speculative_config=settings)
    assert weight_bytes(own._model) == weight_bytes(without_copy._model) + table.nbytes


def test_a_plan_counts_the_head(model: Path) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 40}
    engine = engine_of(model, "torch", **settings)
    speculation = {"method": "eagle3", "model": str(model / "head")}
    wanted = WorkerConfig(
        model=model, dtype="float32", speculative_config=speculation, block_size=4, **settings
    )
    found = footprint_of(wanted, torch.device("cpu"))
    assert found.requirements.weights == weight_bytes(engine._model)
    layers = engine._kv_cache.layers
    assert found.kv_per_token == sum(each.entries[0].nbytes // 4 for each in layers)
