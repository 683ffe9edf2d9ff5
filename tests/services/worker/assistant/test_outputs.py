"""Outputs with drafts by an assistant model are those without, and its drafts depend on the
sequence alone."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, AnyEngine, make_engine
from benchmarks.harness.scheduled import Run
from cli.plan.footprint import footprint_of
from services.worker.startup.plan_memory import weight_bytes
from shared.settings.worker import WorkerConfig
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.assistant.checkpoints import (
    CLUSTERS,
    LAYERS,
    NUM_CLUSTERS,
    OWN,
    save_assistant,
    save_target,
)
from tests.services.worker.assistant.test_drafts import assisted
from tests.services.worker.checkpoints import VOCAB_SIZE, random_prompts

NUM = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an assistant for all tokens, and one with clusters."""
    folder = tmp_path_factory.mktemp("model")
    save_target(folder, initializer_range=0.02)
    save_assistant(folder / "assistant")
    save_assistant(folder / "clusters", **CLUSTERS)
    return folder


def engine_of(
    model: Path, kernels: str, name: str | None = "assistant", **settings: Any
) -> AnyEngine:
    speculation: dict[str, Any] = {"method": "none"}
    if name is not None:
        speculation = assisted(model / name, num_speculative_tokens=3)
    return make_engine(model, kernels, speculative_config=speculation, **settings)


def params_of(num: int = NUM) -> list[SamplingParams]:
    """Every third is greedy; at a high temperature drafts of a random assistant may be right."""
    return [
        SamplingParams(seed=seed, temperature=6.0 if seed % 3 else 0.0, max_tokens=24)
        for seed in range(num)
    ]


@cache
def without(model: Path, **settings: Any) -> list[list[int]]:
    engine = engine_of(model, "native", None, **settings)
    return scheduled.run(engine, random_prompts(NUM), params_of()).texts


def assert_same(found: Run, other: Run) -> None:
    assert found.texts == other.texts
    assert found.verified == other.verified


@pytest.mark.parametrize("name", ["assistant", "clusters"])
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [*((kernels, "float32") for kernels in KERNELS), ("native", "bfloat16")],
)
def test_texts_of_a_crowd_match_runs_without_drafts(
    model: Path, kernels: str, dtype: str, name: str
) -> None:
    engine = engine_of(model, kernels, name, dtype=dtype)
    found = scheduled.run(engine, random_prompts(NUM), params_of())
    assert found.texts == without(model, dtype=dtype)
    assert found.num_accepted > 0


@pytest.mark.parametrize("name", ["assistant", "clusters"])
def test_drafts_are_the_same_alone_and_in_a_crowd(model: Path, name: str) -> None:
    engine = engine_of(model, "native", name)
    alone = scheduled.run(engine, random_prompts(NUM), params_of(), max_open=1)
    assert_same(scheduled.run(engine, random_prompts(NUM), params_of()), alone)


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


@pytest.mark.parametrize("kernels", only([("native",)], KERNELS))
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


@pytest.mark.parametrize("kernels", only([("native",)], KERNELS))
def test_blocks_behind_windows_are_given_back(model: Path, kernels: str) -> None:
    """And drafts read none of them."""
    long = [(prompt * 40)[:80] for prompt in random_prompts(NUM)]
    small = engine_of(model, kernels, max_num_batched_tokens=32)
    found = scheduled.run(small, long, params_of(), max_open=2)
    assert found.num_drops > 0
    assert found.num_accepted > 0
    plain = scheduled.run(engine_of(model, kernels, None), long, params_of())
    assert found.texts == plain.texts


@pytest.mark.parametrize("kernels", only([("native",)], KERNELS))
def test_preempted_sequences_go_on_with_the_same_text(model: Path, kernels: str) -> None:
    num_blocks = 160 // KERNELS[kernels]["block_size"]
    tight = engine_of(model, kernels, max_model_len=72, num_gpu_blocks_override=num_blocks)
    squeezed = scheduled.run(tight, random_prompts(NUM), params_of(), caches_prefixes=True)
    assert squeezed.texts == without(model)
    assert squeezed.num_resumed > 0
    assert squeezed.num_accepted > 0


@pytest.mark.parametrize("kernels", only([("native",)], KERNELS))
def test_drafts_resume_after_a_pause(model: Path, kernels: str) -> None:
    depths = [0, 0, 4, 4, 0, 1, 2, 0, 0, 0, 4]
    found = scheduled.run(
        engine_of(model, kernels), random_prompts(NUM), params_of(), depths=depths
    )
    assert found.texts == without(model)
    assert found.num_accepted > 0


@pytest.mark.parametrize("kernels", KERNELS)
def test_logprobs_of_prompts_and_outputs_match_runs_without_drafts(
    model: Path, kernels: str
) -> None:
    """Native: to the bit."""
    params = [replace(each, logprobs=3, prompt_logprobs=2) for each in params_of()]
    found = scheduled.run(engine_of(model, kernels), random_prompts(NUM), params)
    other = scheduled.run(engine_of(model, kernels, None), random_prompts(NUM), params)
    assert found.texts == other.texts
    assert found.num_accepted > 0
    tolerance = 0.0 if kernels == "native" else 1e-4
    for one, wanted in zip(found.logprobs, other.logprobs, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(wanted), rtol=0, atol=tolerance)
    assert found.scored.keys() == other.scored.keys() == {*range(1, NUM)}  # one prompt is one id
    for index in found.scored:
        drafting, plain = (np.concatenate(each.scored[index]) for each in (found, other))
        np.testing.assert_allclose(drafting, plain, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", ["assistant", "clusters"])
def test_an_assistant_may_have_the_models_quantization(model: Path, name: str) -> None:
    codes = {"quantization": "wint8", "lm_head_quantization": "wint8", "kv_cache_dtype": "int8"}
    found = scheduled.run(
        engine_of(model, "native", name, **codes), random_prompts(NUM), params_of()
    )
    assert found.texts == without(model, **codes)
    assert found.num_accepted > 0


def test_the_tokens_of_clusters_are_counted(model: Path) -> None:
    """Native code keeps their rows as they are."""
    plain, of_clusters = (
        weight_bytes(engine_of(model, "native", name)._model) for name in ("assistant", "clusters")
    )
    assert of_clusters - plain >= 4 * NUM_CLUSTERS * OWN + 8 * VOCAB_SIZE


@pytest.mark.parametrize("name", ["assistant", "clusters"])
def test_a_plan_counts_the_assistant(model: Path, name: str) -> None:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 40}
    engine = engine_of(model, "torch", name, **settings)
    wanted = WorkerConfig(
        model=model,
        dtype="float32",
        speculative_config=assisted(model / name),
        block_size=4,
        **settings,
    )
    found = footprint_of(wanted, torch.device("cpu"))
    assert found.requirements.weights == weight_bytes(engine._model)
    without_drafts = weight_bytes(engine_of(model, "torch", None, **settings)._model)
    assert found.requirements.weights > without_drafts + 4 * VOCAB_SIZE * LAYERS["hidden_size"]
