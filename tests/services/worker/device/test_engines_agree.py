"""Both engines under the scheduler with random requests, settings and plans: outputs, ends and
logprobs are equal."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import AnyEngine, make_engine
from services.worker.layers.attention import Attention
from shared.wire.messages import ALL_TOKENS, SamplingParams
from tests.selection import only
from tests.services.worker.checkpoints import VOCAB_SIZE, save_mimo
from tests.services.worker.driver import model_of

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

FIRST_ID = 8  # lower ids end outputs
ATOL = 1e-3


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo")
    save_mimo(folder)
    return folder


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its first layer sees all keys."""
    folder = tmp_path_factory.mktemp("windowed")
    save_mimo(folder, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    return folder


def draw_settings(rng: random.Random) -> dict[str, Any]:
    method = rng.choice(["none", "mtp", "mtp", "ngram"])
    speculation: dict[str, Any] = {"method": method, "adaptive": rng.random() < 0.3}
    if method != "none":
        speculation["num_speculative_tokens"] = rng.randint(1, 4)
    settings: dict[str, Any] = {"block_size": rng.choice([2, 4, 16])}
    settings |= {"max_num_batched_tokens": rng.choice([24, 60, 512])}
    if rng.random() < 0.4:
        settings["num_gpu_blocks_override"] = rng.choice([260, 300]) // settings["block_size"]
    return settings | {"speculative_config": speculation, "max_model_len": 100}


def draw_params(rng: random.Random) -> SamplingParams:
    rules: dict[str, list[Any]] = {
        "top_k": [1, 3, 20],
        "top_p": [0.3, 0.9],
        "min_p": [0.05],
        "top_n_sigma": [1.0, 3.0],
        "ignore_eos": [True],
        "stop_token_ids": [rng.sample(range(FIRST_ID, VOCAB_SIZE), 4)],
        "logprobs": [0, 5, 20, 40, ALL_TOKENS],
        "prompt_logprobs": [0, 2, 25],
        "presence_penalty": [1.0],
        "repetition_penalty": [1.4],
        "min_tokens": [4],
        "allowed_token_ids": [sorted(rng.sample(range(FIRST_ID, VOCAB_SIZE), 40))],
        "logit_bias": [[(rng.randrange(FIRST_ID, VOCAB_SIZE), rng.choice([-100.0, 5.0, 50.0]))]],
        "draft_logprobs": [True],
    }
    asked = {name: rng.choice(each) for name, each in rules.items() if rng.random() < 0.2}
    temperature = rng.choice([0.0, 0.7, 1.0, 4.0])
    seed, max_tokens = rng.randrange(-(2**62), 2**62), rng.choice([5, 12, 30, None])
    return SamplingParams(seed=seed, temperature=temperature, max_tokens=max_tokens, **asked)


def draw_prompts(rng: random.Random, num: int) -> list[list[int]]:
    """Some share a beginning."""
    prompts: list[list[int]] = []
    for _ in range(num):
        begin = rng.choice(prompts)[: rng.randint(1, 40)] if prompts and rng.random() < 0.5 else []
        more = [rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(rng.randint(1, 30))]
        prompts.append(begin + more)
    return prompts


SOME_CODES = [pytest.param(1, "int8", marks=pytest.mark.slow), (8, "fp8"), (9, "int8")]


def check(seed: int, folder: Path, kv_cache_dtype: str = "auto") -> None:
    rng = random.Random(seed)
    settings = draw_settings(rng) | {"kv_cache_dtype": kv_cache_dtype}
    prompts = draw_prompts(rng, rng.randint(1, 12))
    params = [draw_params(rng) for _ in prompts]
    options: dict[str, Any] = {
        "caches_prefixes": rng.random() < 0.6,
        "pipeline_depth": rng.choice([1, 2]),
        "max_open": rng.choice([1, 3, 12]),
    }
    if rng.random() < 0.5:
        options["depths"] = [rng.randint(0, 4) for _ in range(200)]
    sizes = rng.choice([[1], [2, 4], [1, 3, 8, 24]])
    host = make_engine(folder, "torch", **settings)
    if seed % 2:
        settings["cudagraph_mode"], sizes = "full", [*sizes, 60, 100]
    device = make_engine(folder, "device", cudagraph_capture_sizes=sizes, **settings)
    wanted = scheduled.run(host, prompts, params, **options)
    found = scheduled.run(device, prompts, params, **options)
    assert found.texts == wanted.texts
    assert found.ends == wanted.ends
    for ours, theirs in zip(found.logprobs, wanted.logprobs, strict=True):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=ATOL)


@pytest.mark.parametrize("seed", only([(0,), (9,)], range(12)))
def test_both_engines_emit_the_same_text_and_logprobs(seed: int, mimo: Path) -> None:
    check(seed, mimo)


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_both_engines_emit_the_same_text_and_logprobs_with_windows(
    seed: int, windowed: Path
) -> None:
    check(seed, windowed)


@pytest.mark.parametrize(("seed", "kv_cache_dtype"), SOME_CODES)
def test_both_engines_emit_the_same_text_and_logprobs_with_codes_in_the_cache(
    seed: int, kv_cache_dtype: str, windowed: Path
) -> None:
    check(seed, windowed, kv_cache_dtype)


def test_a_window_of_max_model_len_is_none(windowed: Path) -> None:
    engines = [make_engine(windowed, kernels, max_model_len=6) for kernels in ("torch", "device")]
    engines += [make_engine(windowed, kernels, max_model_len=7) for kernels in ("torch", "device")]
    assert [windows_of(engine) for engine in engines] == [{None}] * 2 + [{None, 6}] * 2


def windows_of(engine: AnyEngine) -> set[int | None]:
    modules = model_of(engine).modules()
    return {module.heads.spec.window for module in modules if isinstance(module, Attention)}


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(10))
def test_both_engines_emit_the_same_text_and_logprobs_at_length(
    piece: int, mimo: Path, windowed: Path
) -> None:
    for seed in range(1000 + 30 * piece, 1030 + 30 * piece):
        check(seed, mimo if seed % 3 else windowed)
