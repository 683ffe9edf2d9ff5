"""A pipeline's stages give one process's results, bit by bit, and concurrently."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    DeepseekV3ForCausalLM,
    Gemma2ForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    LlamaForCausalLM,
)

from benchmarks.harness.scheduled import Run
from services.worker.engine.build import build_engine
from services.worker.layers.stage import Stage
from services.worker.models.registry import MODELS
from services.worker.startup.implementations import PARTS
from services.worker.weights.online import ONLINE
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import ALL_TOKENS, SamplingParams
from tests.services.worker.checkpoints import random_prompts
from tests.services.worker.gemma4 import GEMMA4
from tests.services.worker.hybrids import HYBRIDS, save_hybrid
from tests.services.worker.ranks.stage_processes import Case, Found, run_alone, run_stages
from tests.services.worker.ranks.test_ranks import save, save_codes, save_with_head
from tests.services.worker.stored_codes import LAYOUTS
from tests.services.worker.test_families import CASES, ELSEWHERE
from tests.services.worker.test_mtp_families import FAMILIES, Checkpoint

TOLERANCE = 2e-5  # of logprobs by torch's operators, whose bits depend on the batch
DRAFTS = {"speculative_config": {"adaptive": False}}
SHORT_STEPS = {"max_num_batched_tokens": 9}
PROMPTS = random_prompts(8)
GREEDY = SamplingParams(seed=3, temperature=0.0, max_tokens=8, logprobs=ALL_TOKENS)
DRAWN = SamplingParams(seed=5, temperature=0.8, top_p=0.9, max_tokens=10, logprobs=2)
SCORED = SamplingParams(seed=4, temperature=0.0, max_tokens=4, prompt_logprobs=3)
ONLY_SCORED = SamplingParams(seed=4, max_tokens=0, prompt_logprobs=0)
MIXED = [GREEDY, DRAWN, SCORED, ONLY_SCORED] * 2


def case(folder: Path, params: Any = MIXED, **settings: Any) -> Case:
    return Case(folder, PROMPTS, params, settings=settings)


def numbers(run: Run) -> np.ndarray:
    """Logprobs of outputs and prompts, and pooled vectors."""
    texts = [row for rows in run.logprobs for row in rows]
    prompts = [row for index in sorted(run.scored) for row in run.scored[index]]
    return np.concatenate([*texts, *prompts, *(run.pooled[index] for index in sorted(run.pooled))])


def assert_same(found: dict[str, Found], cases: dict[str, Case]) -> None:
    for name, each in cases.items():
        expected, run = run_alone(each), found[name].run
        assert run.texts == expected.texts, name
        assert run.ends == expected.ends, name
        if found[name].is_native:
            assert numbers(run).tobytes() == numbers(expected).tobytes(), name
        else:
            assert_close(run, expected)
        assert found[name].num_ahead > 0, name


def assert_close(run: Run, expected: Run) -> None:
    """Almost equally likely tokens may have swapped places."""
    found, own = (np.sort(numbers(each)) for each in (run, expected))
    assert abs(found - own).max() < TOLERANCE


def test_stages_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Three stages: outputs and all logprobs, of prompts too, in chunks; tied
    embeddings, quantized weights, a state, and drafts of an MTP head with the embedding."""
    granite = save(tmp_path / "granite", GraniteForCausalLM, tie_word_embeddings=True)
    (tmp_path / "states").mkdir()
    types = ["linear_attention", "full_attention"] * 3
    calm = {"num_hidden_layers": 6, "initializer_range": 0.1}  # rounding is not magnified
    save_hybrid(tmp_path / "states", "qwen3-next", layer_types=types, **calm)
    codes = {"quantization": "wint4", "embedding_quantization": "wint8"}
    mimo = save_with_head(tmp_path / "mimo")
    cases = {
        "granite, codes": case(granite, **codes, kv_cache_dtype="int8"),
        "mimo": case(mimo, **DRAFTS, **SHORT_STEPS),
        "states": case(tmp_path / "states"),
    }
    found = run_stages(cases, 3, tmp_path)
    assert_same(found, cases)
    assert all(each.is_native for each in found.values())
    assert found["mimo"].run.num_accepted > 0


@pytest.mark.slow
def test_stages_of_more_models_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Windows, latents, experts, and prompt lookup."""
    llama = save(tmp_path / "llama", LlamaForCausalLM)
    gemma = save(tmp_path / "gemma", Gemma2ForCausalLM, **CASES["gemma 2"][1])
    latents = save(tmp_path / "latents", DeepseekV3ForCausalLM, **CASES["deepseek v3, yarn"][1])
    cases = {
        "llama": case(llama, **SHORT_STEPS),
        "gemma": case(gemma, **SHORT_STEPS),
        "latents": case(latents, enable_expert_distribution_metrics="loads" in PARTS),
        "gpt-oss": case(save(tmp_path / "oss", GptOssForCausalLM, **CASES["gpt-oss"][1])),
        "ngram": case(llama, speculative_config={"method": "ngram", "adaptive": False}),
    }
    found = run_stages(cases, 3, tmp_path)
    assert_same(found, cases)
    assert all(each.is_native for each in found.values())


@pytest.mark.slow
def test_preempted_sequences_and_prefix_hits_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Blocks for two or three sequences, with two prompts that share a beginning."""
    mimo = save_with_head(tmp_path / "mimo")
    long = random_prompts(9, seed=4)[-3:]
    prompts = [ids for start in long for ids in (start * 2, start * 2, [*start * 2, 9])]
    params = SamplingParams(seed=2, temperature=0.7, max_tokens=30, logprobs=1, ignore_eos=True)
    settings = {**DRAFTS, "num_gpu_blocks_override": 14}
    options = {"caches_prefixes": True, "max_open": 6}
    tight = Case(mimo, prompts, params, settings=settings, options=options)
    found = run_stages({"tight": tight}, 2, tmp_path)["tight"].run
    plenty = run_alone(Case(mimo, prompts, params))
    assert found.texts == plenty.texts
    assert numbers(found).tobytes() == numbers(plenty).tobytes()
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    assert found.num_accepted > 0


def test_stages_of_two_hosts_by_torchs_operators_have_the_texts_of_one_process(
    tmp_path: Path,
) -> None:
    mimo = save_with_head(tmp_path / "mimo")
    torchs = Case(mimo, PROMPTS, MIXED, "torch", DRAFTS)
    found = run_stages({"torch": torchs}, 2, tmp_path, num_hosts=2)["torch"].run
    expected = run_alone(torchs)
    assert found.texts == expected.texts
    assert_close(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_stages_have_the_bits_of_every_family(tmp_path: Path, size: int) -> None:
    cases = {}
    for number, (name, (family, changes)) in enumerate(CASES.items()):
        cases[name] = case(save(tmp_path / f"model-{number}", family, **changes))
    for name, head in FAMILIES.items():
        folder = tmp_path / f"head-{len(cases)}"
        folder.mkdir()
        cases[f"{name}, drafts"] = case(Checkpoint(head, folder).folder, **DRAFTS)
    found = run_stages(cases, size, tmp_path)
    assert_same(found, cases)


@pytest.mark.slow
def test_stages_have_the_bits_of_every_form_of_weights(tmp_path: Path) -> None:
    family, changes = CASES["qwen3 moe"]
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 4}
    dense = save(tmp_path / "dense", family, **(changes | sizes), initializer_range=0.1)
    cases: dict[str, Case] = {
        form: case(dense, quantization=form, lm_head_quantization=form) for form in ONLINE
    }
    for layout in LAYOUTS:
        cases[f"{layout}, stored"] = case(save_codes(dense, tmp_path / layout, layout))
    found = run_stages(cases, 2, tmp_path)
    assert_same(found, cases)


def test_the_first_stages_have_the_layers_that_do_not_divide() -> None:
    shares = [list(Stage(number, 3).layers(8)) for number in range(3)]
    assert shares == [[0, 1, 2], [3, 4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pipeline_parallel_size": 4}, "4 stages, and the model has 3 layers.*1 to 3 would work"),
        ({"pipeline_parallel_size": 2, "model_impl": "transformers"}, "2 is for our own archit"),
        ({"pipeline_parallel_size": 2, "cpu_offload_gb": 1}, "cpu-offload-gb: 1"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "with tensor-parallel-size 2"),
        ({"pipeline_parallel_size": 2, "device": "cuda"}, "stages are supported on CPUs only"),
        ({"pipeline_parallel_size": 3, "nnodes": 2}, "2 hosts cannot .* 3 ranks .pipeline-par"),
    ],
)
def test_features_missing_in_stages_are_refused(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    folder = save(tmp_path / "llama", LlamaForCausalLM)
    with pytest.raises((ConfigError, ValueError), match=text):
        build_engine(
            WorkerConfig(**{"model": folder, "device": "cpu", **settings}),
            lambda text, fraction: None,
        )


def test_every_family_is_compared() -> None:
    """test_hybrid_engines.py has the models with states, test_gemma4.py Gemma 4."""
    compared = [*CASES.values(), *HYBRIDS.values(), *GEMMA4.values()]
    assert {family.__name__ for family, _ in compared} | {*ELSEWHERE} >= set(MODELS)
