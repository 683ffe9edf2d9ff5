"""The engine on a CUDA device gives the CPU's outputs, recorded or not, with and without drafts.
Needs a GPU: `pytest -m gpu`."""

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from kernels import switches
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.gpu.engines import drafting, make_cuda_engine, prompts

pytestmark = pytest.mark.gpu
TEMPERATURES = [0.0, 0.8]
LOGPROB_TOLERANCE = 1e-3  # in float32
SIZES = [2, 16, 64, 128]
PROMPTS_IN_GRAPHS: dict[str, Any] = {
    "cudagraph_mode": "full",
    "cudagraph_capture_sizes": SIZES,
}
STEPS: dict[str, dict[str, Any]] = {"graphs": {}, "eager": {"enforce_eager": True}}


def params_of(temperature: float, **rules: Any) -> list[SamplingParams]:
    common = {"temperature": temperature, "max_tokens": 40}
    return [SamplingParams(seed=seed, **(common | rules)) for seed in range(len(prompts()))]


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_texts_in_float32_are_the_cpus(temperature: float, steps: dict[str, Any]) -> None:
    engine = make_cuda_engine(speculative_config=drafting(0), **steps)
    host = make_engine(EMBEDDED_MODEL, speculative_config=drafting(0), max_num_seqs=8)
    found = scheduled.run(engine, prompts(), params_of(temperature))
    assert found.texts == scheduled.run(host, prompts(), params_of(temperature)).texts


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_launches_that_begin_early_change_no_text(
    steps: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph they are programmatic edges."""
    speculation: dict[str, Any] = {"speculative_config": drafting(2)}
    expected = scheduled.run(make_cuda_engine(**speculation, **steps), prompts(), params_of(0.8))
    monkeypatch.setattr(switches, "DEPENDENT_LAUNCHES", False)
    engine = make_cuda_engine(**speculation, **steps)
    assert scheduled.run(engine, prompts(), params_of(0.8)).texts == expected.texts


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_with_filters_of_their_own_sample_like_the_cpu(depth: int) -> None:
    """Every combination, next to greedy rows, with equal probabilities."""
    filters: Any = {"temperature": [0.0, 0.8, 1.3], "top_k": [0, 20], "top_p": [1.0, 0.7]}
    filters |= {"min_p": [0.0, 0.05], "top_n_sigma": [0.0, 2.0]}
    rules = [
        dict(zip(filters, values, strict=True)) for values in itertools.product(*filters.values())
    ]
    params = [
        SamplingParams(seed=seed, max_tokens=20, logprobs=seed % 21, **each)
        for seed, each in enumerate(rules)
    ]
    texts = [prompt for _, prompt in zip(params, itertools.cycle(prompts()), strict=False)]
    speculation: dict[str, Any] = {"speculative_config": drafting(depth)}
    found = scheduled.run(make_cuda_engine(**speculation), texts, params)
    host = make_engine(EMBEDDED_MODEL, max_num_seqs=8, **speculation)
    expected = scheduled.run(host, texts, params)
    assert found.texts == expected.texts
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_texts_in_float32_are_the_same_at_every_depth(
    temperature: float, steps: dict[str, Any]
) -> None:
    without, *others = (
        scheduled.run(
            make_cuda_engine(speculative_config=drafting(depth), **steps),
            *(prompts(), params_of(temperature)),
        )
        for depth in range(4)
    )
    for with_drafts in others:
        assert with_drafts.texts == without.texts
        assert with_drafts.num_accepted > 0


@pytest.mark.parametrize("num_rows", [1, 3, 8])
@pytest.mark.parametrize("depth", [0, 2])
def test_recorded_steps_bring_the_bits_that_others_bring(num_rows: int, depth: int) -> None:
    """In bfloat16; three rows are padded with rows of the null slot."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "speculative_config": drafting(depth)}
    params = params_of(0.8, logprobs=5)[:num_rows]
    recorded, eager = (
        scheduled.run(make_cuda_engine(**settings, **steps), prompts()[:num_rows], params)
        for steps in STEPS.values()
    )
    assert recorded.texts == eager.texts
    assert recorded.verified == eager.verified
    for one, other in zip(recorded.logprobs, eager.logprobs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("depth", [0, 2])
def test_texts_in_float32_are_the_cpus_with_prompts_in_graphs(depth: int) -> None:
    """Prompts of one to several hundred tokens join decoding rows; the longest have no graph."""
    speculation: dict[str, Any] = {"speculative_config": drafting(depth)}
    engine = make_cuda_engine(**speculation, **PROMPTS_IN_GRAPHS)
    assert len(engine._trunks) == len(SIZES) * (2 if depth else 1) - (depth > 0)
    host = make_engine(EMBEDDED_MODEL, max_num_seqs=8, **speculation)
    found = scheduled.run(engine, prompts(), params_of(0.8), max_open=5)
    assert found.texts == scheduled.run(host, prompts(), params_of(0.8), max_open=5).texts


@pytest.mark.parametrize("depth", [0, 2])
def test_prompts_in_graphs_bring_the_bits_that_others_bring(depth: int) -> None:
    """In bfloat16, in steps of at most 64 tokens with our own GEMMs; twice, to detect leftovers in
    a graph's tensors."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_batched_tokens": 64}
    settings |= {"speculative_config": drafting(depth)}
    params = params_of(0.8, logprobs=5, prompt_logprobs=2)
    recorded = make_cuda_engine(**settings, **PROMPTS_IN_GRAPHS)
    eager = make_cuda_engine(**settings, enforce_eager=True)
    expected = scheduled.run(eager, prompts(), params, max_open=5)
    for _ in range(2):
        found = scheduled.run(recorded, prompts(), params, max_open=5)
        recorded.reset()
        assert found.texts == expected.texts
        assert found.verified == expected.verified
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            np.testing.assert_array_equal(one, other)
