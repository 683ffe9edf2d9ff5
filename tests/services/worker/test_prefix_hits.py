"""An output after a cached beginning equals one computed from the first token on."""

import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, AnyEngine, make_engine
from benchmarks.harness.scheduled import Run
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams

PARAMS = SamplingParams(seed=0, temperature=0.0, max_tokens=24, ignore_eos=True)


CACHES = [("native", "auto")]
MORE_CACHES = [
    *(("native", "int8"), ("native", "fp8"), ("torch", "auto"), ("torch", "fp8")),
    *(("device", "auto"), ("device", "int8")),
]


@pytest.fixture(
    scope="module",
    params=[*CACHES, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_CACHES)],
    ids=", ".join,
)
def engine(request: pytest.FixtureRequest) -> AnyEngine:
    """Steps of 7 tokens end inside blocks; there are blocks for two or three sequences."""
    kernels, kv_cache_dtype = request.param
    num_blocks = 160 // ENGINES[kernels]["block_size"]
    return make_engine(
        EMBEDDED_MODEL,
        kernels,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=128,
        max_num_batched_tokens=7,
        num_gpu_blocks_override=num_blocks,
        speculative_config={"method": "none"},
    )


def run(engine: AnyEngine, prompts: list[list[int]], caches_prefixes: bool) -> Run:
    return scheduled.run(
        engine, prompts, PARAMS, caches_prefixes=caches_prefixes, pipeline_depth=1, max_open=4
    )


def random_ids(num: int, length: int, seed: int) -> list[list[int]]:
    return np.random.default_rng(seed).integers(300, 8000, (num, length)).tolist()


def test_greedy_texts_with_hits_match_runs_without(engine: AnyEngine) -> None:
    first, second = random_ids(2, 42, seed=8)
    prompts = [first, first, first[:33], [*first[:17], *second], second, [*second, 5], first[:41]]
    cached, plain = run(engine, 2 * prompts, True), run(engine, 2 * prompts, False)
    assert cached.texts == plain.texts
    assert cached.num_hits > 7
    assert cached.num_resumed > 0
    assert plain.num_hits == 0


def test_a_conversation_goes_on_from_its_cached_output(engine: AnyEngine) -> None:
    prompts = random_ids(3, 30, seed=9)
    texts = run(engine, prompts, False).texts
    turns = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    talks = [each for talk in zip(prompts, turns, strict=True) for each in talk]
    cached = run(engine, talks, True)
    assert cached.texts == run(engine, talks, False).texts
    assert cached.num_hits > 0
