"""Sequences with adapters of experts: the same bits in any batch and plan, with cached prefixes and
drafts, over dense and quantized weights."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from benchmarks.harness.scheduled import Run
from services.worker.adapters.sites import LoadedAdapter
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.adapters.made import (
    DIGESTS,
    engine_with,
    make_adapter,
    shapes_of,
    texts_of,
)
from tests.services.worker.adapters.test_experts import FAMILIES
from tests.services.worker.adapters.test_texts import assert_near, assert_rows, assert_same
from tests.services.worker.checkpoints import random_prompts, save_model
from tests.services.worker.test_rounded import some_builds_round

NUM = 8
OF_PROMPTS = [("", *DIGESTS[:3])[number % 4] for number in range(NUM)]
PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=24)
REPEATS = {"initializer_range": 0.1, "tie_word_embeddings": True}  # its greedy texts do
WIDE = {"hidden_size": 128, "moe_intermediate_size": 64}


def is_joined(name: str) -> bool:
    return name.endswith("gate_up_proj")


def made_for(folder: Path, dtype: torch.dtype = torch.float32) -> list[LoadedAdapter]:
    """Of everything, experts' gates and ups in one tensor or in two; of some experts' downs."""
    shapes = shapes_of(folder, lambda site: True)
    keeps: list[Callable[[str], bool]] = [
        lambda name: not is_joined(name),
        lambda name: is_joined(name) or ".experts." not in name,
        lambda name: "experts.1.down" in name or ("experts.3." in name and not is_joined(name)),
    ]
    return [
        make_adapter(shapes, digest, rank, dtype, keeps=each)
        for digest, rank, each in zip(DIGESTS, (4, 17, 8), keeps, strict=False)
    ]


@pytest.fixture(
    scope="module",
    params=only(
        [("qwen3 moe",), ("gpt-oss",)], ["qwen3 moe", "gpt-oss", "glm moe", "nemotron 3, latents"]
    ),
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    save_model(folder, family, "10MB", **changes)
    return folder


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_native_rows_have_the_same_bits_in_any_batch(folder: Path, dtype: str) -> None:
    adapters, prompts = made_for(folder, getattr(torch, dtype)), random_prompts(8, seed=3)
    engine = engine_with(folder, "native", adapters, dtype=dtype)
    digests = [*(each.digest for each in adapters), ""] * 2
    whole = texts_of(engine, prompts, digests, chunk_sizes=(3, 7, 1, 20))
    assert_rows(engine, whole[:4], prompts[:4], digests[:4])
    plain = texts_of(make_engine(folder, "native", dtype=dtype), prompts, [""] * 8)
    assert_same([whole[3], whole[7]], [plain[3], plain[7]])


@pytest.mark.parametrize("form", ["wint8", "wint4"])
def test_quantized_weights(tmp_path: Path, form: str) -> None:
    family, changes = FAMILIES["qwen3 moe"]
    save_model(tmp_path, family, "10MB", **(changes | WIDE))
    adapters, prompts = made_for(tmp_path), random_prompts(4)
    digests = [*(each.digest for each in adapters), ""]
    settings: dict[str, Any] = {"quantization": form, "lm_head_quantization": form}
    torchs = texts_of(engine_with(tmp_path, "torch", adapters, **settings), prompts, digests)
    engine = engine_with(tmp_path, "native", adapters, **settings)
    found = texts_of(engine, prompts, digests)
    assert_near(found, torchs)
    assert_rows(engine, found, prompts, digests)


@pytest.mark.parametrize("form", [pytest.param("wint8", marks=some_builds_round("wint8")), "wint4"])
def test_operands_in_8_bits(tmp_path: Path, form: str) -> None:
    family, changes = FAMILIES["qwen3 moe"]
    save_model(tmp_path, family, "10MB", **(changes | WIDE))
    adapters, prompts = made_for(tmp_path), random_prompts(4)
    digests = [*(each.digest for each in adapters), ""]
    settings: dict[str, Any] = {"quantization": form, "activation_dtype": "int8"}
    engine = engine_with(tmp_path, "native", adapters, **settings)
    assert_rows(engine, texts_of(engine, prompts, digests), prompts, digests)


@cache
def prompts_of(seed: int) -> list[list[int]]:
    """Their second half is the first one again, which prompt lookup drafts."""
    return [2 * prompt for prompt in random_prompts(NUM, seed)]


def run(engine: Any, num_steps: int, **options: Any) -> Run:
    return scheduled.run(
        engine, prompts_of(1), PARAMS, num_steps=num_steps, adapters=OF_PROMPTS, **options
    )


@pytest.mark.parametrize("name", ["qwen3 moe", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_plans_drafts_and_cached_prefixes_change_no_text(tmp_path: Path, name: str) -> None:
    family, changes = FAMILIES[name]
    save_model(tmp_path, family, "10MB", **(changes | REPEATS))
    folder, adapters = tmp_path, made_for(tmp_path)
    limits: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 16, "max_loras": 3}
    plain = engine_with(folder, "native", adapters, **limits)
    single = run(plain, 1)
    several = run(plain, 16)
    assert several.num_long_plans > 0
    assert several.texts == single.texts
    twice = scheduled.run(
        plain,
        prompts_of(1) * 2,
        PARAMS,
        adapters=OF_PROMPTS * 2,
        caches_prefixes=True,
        max_open=NUM,
    )
    assert twice.num_hits > 0
    assert twice.texts == single.texts * 2
    drafting = {"method": "ngram", "adaptive": False}
    drafts = engine_with(folder, "native", adapters, **limits, speculative_config=drafting)
    drafted = run(drafts, 3)
    assert drafted.num_accepted > 0
    assert drafted.texts == single.texts
    base = scheduled.run(plain, prompts_of(1), PARAMS)
    pairs = zip(base.texts, single.texts, OF_PROMPTS, strict=True)
    changed = [adapter for one, other, adapter in pairs if one != other]
    assert {*changed} == {*DIGESTS[:3]}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_prompt_logprobs_have_the_head_of_their_sequence(tmp_path: Path, kernels: str) -> None:
    family, changes = FAMILIES["qwen3 moe"]
    save_model(tmp_path, family, "10MB", **changes)
    (adapter, *_), prompts = made_for(tmp_path), random_prompts(4)[1:]
    head = adapter._replace(layers={"lm_head": adapter.layers["lm_head"]})
    engine = engine_with(tmp_path, kernels, [head])
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=3, prompt_logprobs=4)
    digests = ["", head.digest, ""]
    together = scheduled.run(engine, prompts, params, adapters=digests)
    for number, digest in enumerate(digests):
        own = slice(number, number + 1)
        alone = scheduled.run(engine, prompts[own], params, adapters=[digest])
        found, wanted = (
            np.concatenate(each) for each in (together.scored[number], alone.scored[0])
        )
        np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert kernels == "torch" or found.tobytes() == wanted.tobytes()
    base = scheduled.run(engine, prompts, params)
    same = [
        np.allclose(np.concatenate(together.scored[i]), np.concatenate(base.scored[i]))
        for i in range(3)
    ]
    assert same == [True, False, True]
