"""The engine for GPUs with an interpreted kernel for every operator, compared with the host engine
on torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import Glm4MoeForCausalLM, Lfm2ForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from kernels import dispatch
from shared.wire.messages import ALL_TOKENS, SamplingParams
from tests.services.worker.checkpoints import save_mimo, save_model
from tests.services.worker.driver import Driver, Job
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_families import GLM, LFM
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint

LOGPROB_TOLERANCE = 1e-3  # in float32
# Mean over bfloat16 logprobs with a spread of 1.6: they round at different places.
BFLOAT16_TOLERANCE = 0.03
VOCAB_SIZE = 160
PROMPTS = [np.random.default_rng(num).integers(8, VOCAB_SIZE, num).tolist() for num in (1, 4, 11)]
RULES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "filters": {"top_p": 0.7, "top_k": 30, "min_p": 0.01, "top_n_sigma": 2.5},
    "penalty": {"presence_penalty": 2.0, "repetition_penalty": 1.5},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mimo")
    save_mimo(folder, num_hidden_layers=1)
    return folder


@contextmanager
def by_torch() -> Iterator[None]:
    """No operator is interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "IS_INTERPRETED", False)
        yield


def params_of(num: int, **rules: Any) -> list[SamplingParams]:
    common = {"temperature": 0.8, "max_tokens": 3, "ignore_eos": True}
    return [SamplingParams(seed=seed, **(common | rules)) for seed in range(num)]


@pytest.mark.parametrize(
    "names",
    [[*RULES], *(pytest.param([name], marks=pytest.mark.slow) for name in RULES)],
    ids=", ".join,
)
def test_texts_and_logprobs_are_the_host_engines(folder: Path, names: list[str]) -> None:
    """Prompts in chunks, next to decoding rows."""
    nums = {"logprobs": 3, "prompt_logprobs": 2}
    params = [
        msgspec.structs.replace(each, **RULES[name])
        for each, name in zip(params_of(len(PROMPTS), **nums), cycle(names), strict=False)
    ]
    found = [Job(*each) for each in zip(PROMPTS, params, strict=True)]
    expected = [Job(*each) for each in zip(PROMPTS, params, strict=True)]
    engine = make_engine(folder, "device", max_num_seqs=4, enforce_eager=True)
    Driver(engine, (3, 5)).run(found)
    with by_torch():
        Driver(make_engine(folder, max_num_seqs=4), (1000,)).run(expected)
    for job, other in zip(found, expected, strict=True):
        assert job.emitted == other.emitted
        np.testing.assert_allclose(job.logprobs, other.logprobs, atol=LOGPROB_TOLERANCE)
        np.testing.assert_allclose(of_prompt(job), of_prompt(other), atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    [
        "awq",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("gptq, desc_act", "fp8", "bitsandbytes")
        ),
    ],
)
def test_texts_of_a_model_in_codes_are_the_host_engines(
    folder: Path, layout: str, tmp_path: Path
) -> None:
    save_quantized(folder, tmp_path, LAYOUTS[layout])
    params = params_of(len(PROMPTS), logprobs=3)
    found = [Job(*each) for each in zip(PROMPTS, params, strict=True)]
    expected = [Job(*each) for each in zip(PROMPTS, params, strict=True)]
    Driver(make_engine(tmp_path, "device", max_num_seqs=4, enforce_eager=True), (3, 5)).run(found)
    with by_torch():
        Driver(make_engine(tmp_path, max_num_seqs=4), (1000,)).run(expected)
    for job, other in zip(found, expected, strict=True):
        assert job.emitted == other.emitted
        np.testing.assert_allclose(job.logprobs, other.logprobs, atol=LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    "layout",
    ["gptq, desc_act", *(pytest.param(each, marks=pytest.mark.slow) for each in ("dense", "awq"))],
)
def test_texts_of_a_model_with_experts_are_the_host_engines(layout: str, tmp_path: Path) -> None:
    """The order of inputs differs by expert; a prompt has more than 64 tokens."""
    changes: dict[str, Any] = {**GLM, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    changes |= {"n_group": 4, "topk_group": 2, "n_shared_experts": 1, "routed_scaling_factor": 2.5}
    save_model(tmp_path / "dense", Glm4MoeForCausalLM, **changes)
    if layout != "dense":
        save_quantized(tmp_path / "dense", tmp_path / layout, LAYOUTS[layout])
    prompts = [*PROMPTS, [8 + num % 150 for num in range(70)]]
    params = params_of(len(prompts), logprobs=3)
    found = [Job(*each) for each in zip(prompts, params, strict=True)]
    expected = [Job(*each) for each in zip(prompts, params, strict=True)]
    engine = make_engine(tmp_path / layout, "device", max_num_seqs=4, enforce_eager=True)
    Driver(engine, (3, 70)).run(found)
    with by_torch():
        Driver(make_engine(tmp_path / layout, "torch", max_num_seqs=4), (1000,)).run(expected)
    for job, other in zip(found, expected, strict=True):
        assert job.emitted == other.emitted
        np.testing.assert_allclose(job.logprobs, other.logprobs, atol=LOGPROB_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prompts_in_graphs_bring_the_bits_that_others_bring(folder: Path, dtype: str) -> None:
    """In chunks, next to decoding rows: steps of up to 8 tokens in a graph."""
    params = params_of(2, logprobs=3, prompt_logprobs=2)
    found, expected = ([Job(*each) for each in zip(PROMPTS[1:], params, strict=True)] for _ in "12")
    graphs = {"cudagraph_mode": "full", "cudagraph_capture_sizes": [8]}
    for jobs, steps in ((found, graphs), (expected, {"enforce_eager": True})):
        engine = make_engine(folder, "device", dtype=dtype, max_num_seqs=4, **steps)
        Driver(engine, (1, 3, 5)).run(jobs)
    for job, other in zip(found, expected, strict=True):
        assert job.emitted == other.emitted
        np.testing.assert_array_equal(job.logprobs, other.logprobs)
        assert of_prompt(job) == of_prompt(other)


def of_prompt(job: Job) -> list[float]:
    return [value for _, part in job.prompt_parts for value in part.values.tolist()]


def test_bfloat16_logprobs_are_near_torch(folder: Path) -> None:
    """Of prompts, and of decode rows with a single allowed token."""
    whole = {"logprobs": ALL_TOKENS, "prompt_logprobs": ALL_TOKENS}
    params = params_of(len(PROMPTS), allowed_token_ids=[20], **whole)
    found = [Job(*each) for each in zip(PROMPTS, params, strict=True)]
    expected = [Job(*each) for each in zip(PROMPTS, params, strict=True)]
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 4, "enforce_eager": True}
    Driver(make_engine(folder, "device", **settings), (3, 5)).run(found)
    with by_torch():
        Driver(make_engine(folder, **settings), (1000,)).run(expected)
    for job, other in zip(found, expected, strict=True):
        assert len(job.logprobs) == job.params.max_tokens
        for ours, theirs in ((job.logprobs, other.logprobs), (of_prompt(job), of_prompt(other))):
            differences = np.abs(np.subtract(ours, theirs))
            assert not differences.size or differences.mean() < BFLOAT16_TOLERANCE


GREEDY = (0.0, {"enforce_eager": True})
HOT = (6.0, {"cudagraph_capture_sizes": [3]})


@pytest.mark.parametrize(
    ("temperature", "steps", "max_tokens"),
    [
        (*HOT, 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((*GREEDY, 6), (*HOT, 6))),
    ],
    ids=["hot, in steps of three rows", "greedy, longer", "hot, longer"],
)
def test_with_drafts_the_texts_are_the_host_engines_without(
    folder: Path, temperature: float, steps: dict[str, Any], max_tokens: int
) -> None:
    """At a high temperature even drafts of a random head are often accepted: they are sampled with
    the random bits of their target tokens."""
    logprobs = {"logprobs": 0, "draft_logprobs": True}
    params = params_of(len(PROMPTS), temperature=temperature, max_tokens=max_tokens, **logprobs)
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    common: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    engine = make_engine(folder, "device", speculative_config=speculation, **common, **steps)
    found = scheduled.run(engine, PROMPTS, params)
    with by_torch():
        drafting = make_engine(folder, speculative_config=speculation, **common)
        beside = scheduled.run(drafting, PROMPTS, params)
        expected = scheduled.run(make_engine(folder, **common), PROMPTS, params)
    assert found.texts == expected.texts
    assert (found.num_accepted > 0) == (temperature > 0)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=LOGPROB_TOLERANCE)
    assert found.verified == beside.verified
    for rows, others in zip(found.drafts, beside.drafts, strict=True):
        for (_, ours), (_, theirs) in zip(rows, others, strict=True):
            np.testing.assert_array_equal([ours.ids, ours.ranks], [theirs.ids, theirs.ranks])
            np.testing.assert_allclose(ours.values, theirs.values, atol=LOGPROB_TOLERANCE)


@pytest.mark.slow
def test_texts_of_a_model_with_groups_of_layers_are_the_host_engines(tmp_path: Path) -> None:
    """The first prompt's blocks behind the window are given back."""
    windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    save_mimo(tmp_path, num_hidden_layers=3, **windows)
    prompts = [np.random.default_rng(num).integers(8, VOCAB_SIZE, num).tolist() for num in (80, 9)]
    speculation = {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False}
    common: dict[str, Any] = {"max_num_batched_tokens": 48, "max_model_len": 100}
    common |= {"max_num_seqs": 2, "speculative_config": speculation}
    params = params_of(len(prompts), temperature=6.0)
    engine = make_engine(tmp_path, "device", cudagraph_capture_sizes=[2], **common)
    found = scheduled.run(engine, prompts, params)
    with by_torch():
        expected = scheduled.run(make_engine(tmp_path, **common), prompts, params)
    assert found.texts == expected.texts
    assert engine._slots._num_dropped.any()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["states", "scans", "convolutions"])
def test_texts_of_layers_other_than_attention_are_the_host_engines(
    name: str, tmp_path: Path
) -> None:
    """Two prompts have 64 ids in common, after which the second one begins, in steps with drafts
    and in graphs."""
    torch.manual_seed(0)
    if name == "states":
        Checkpoint(HYBRID_FAMILIES["Qwen3.5"], tmp_path)
    elif name == "scans":
        save_hybrid(tmp_path, "granite 4, tied")
    else:
        save_model(tmp_path, Lfm2ForCausalLM, **LFM)
    beginning = np.random.default_rng(1).integers(8, VOCAB_SIZE, 64).tolist()
    prompts = [[*beginning, 9], PROMPTS[2], [*beginning, 11, 12], PROMPTS[0]]
    method = {"states": "mtp", "scans": "ngram", "convolutions": "none"}[name]
    speculation = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    common: dict[str, Any] = {"max_num_batched_tokens": 40, "max_model_len": 80}
    common |= {"max_num_seqs": 2, "speculative_config": speculation}
    params = params_of(len(prompts), temperature=6.0, logprobs=0)
    engine = make_engine(tmp_path, "device", cudagraph_capture_sizes=[2], **common)
    found = scheduled.run(engine, prompts, params, caches_prefixes=True, max_open=2)
    with by_torch():
        expected = scheduled.run(make_engine(tmp_path, **common), prompts, params)
    assert found.texts == expected.texts
    assert found.num_hits > 0
    assert (found.num_accepted > 0) == (method == "mtp")
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, atol=LOGPROB_TOLERANCE)
