"""Gemma 2 and 3 in every engine: quantized weights and caches, prefix hits, preemption, contexts
longer than windows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.models.registry import read_model_config
from services.worker.weights.online import Quantization
from shared.errors import ConfigError
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import (
    assert_greedy,
    change_config,
    quantized,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.test_families import assert_same_logits

NAMES = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
slow = pytest.mark.slow
KERNELS = [pytest.param(name, marks=() if name == "native" else slow) for name in ENGINES]
CACHES = [
    ("native", "auto"),
    ("native", "int8"),
    pytest.param("native", "fp8", marks=slow),
    pytest.param("torch", "int8", marks=slow),
    pytest.param("device", "fp8", marks=slow),
]


def long_prompts(num: int) -> list[list[int]]:
    """40 … 75 ids with a common beginning; windows have 5."""
    rng = np.random.default_rng(1)
    beginning = rng.integers(8, 160, 36).tolist()
    return [beginning + rng.integers(8, 160, 4 + 5 * (i % 8)).tolist() for i in range(num)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("name", "quantization"), [*zip(NAMES, ("wint4", "fp8"), strict=True)])
def test_texts_match_transformers_with_dequantized_weights(
    tmp_path: Path, name: str, quantization: Quantization, kernels: str
) -> None:
    save_family(tmp_path, name)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    engine = make_engine(tmp_path, kernels, quantization=quantization)
    prompts = [*random_prompts(4), *long_prompts(2)]
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    with quantized(oracle, quantization):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize(("kernels", "cache"), CACHES)
@pytest.mark.parametrize("name", NAMES)
def test_texts_are_the_same_after_prefix_hits_and_preemption(
    tmp_path: Path, name: str, kernels: str, cache: str
) -> None:
    """Blocks for two of the longest; chunks that end within blocks."""
    save_family(tmp_path, name)
    prompts = long_prompts(8)
    params = SamplingParams(seed=1, temperature=0.7, max_tokens=24, ignore_eos=True)
    settings: dict[str, Any] = {"kv_cache_dtype": cache, "max_model_len": 112}
    expected = scheduled.run(make_engine(tmp_path, kernels, **settings), prompts, params)
    settings["num_gpu_blocks_override"] = 224 // ENGINES[kernels]["block_size"]
    tight = make_engine(tmp_path, kernels, max_num_batched_tokens=39, **settings)
    squeezed = scheduled.run(tight, prompts, params, caches_prefixes=True, max_open=6)
    assert squeezed.texts == expected.texts
    assert squeezed.num_hits > squeezed.num_resumed > 0


def test_older_configs_have_rope_scaling_and_a_pattern(tmp_path: Path) -> None:
    """As in google/gemma-3-4b-it."""
    save_model(tmp_path, Gemma3ForCausalLM, head_dim=16, sliding_window=7, num_hidden_layers=4)
    scaling = {"rope_type": "linear", "factor": 8.0}
    older = {"rope_theta": 1e5, "rope_local_base_freq": 50.0, "sliding_window_pattern": 3}
    change_config(tmp_path, layer_types=None, rope_parameters=None, rope_scaling=scaling, **older)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert oracle.config.layer_types == kinds
    assert_same_logits(tmp_path, oracle)
    change_config(tmp_path, rope_scaling=None, rope_theta=None, rope_local_base_freq=None)
    assert_same_logits(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path).eval())


def test_embeddings_are_scaled_in_the_models_type(tmp_path: Path) -> None:
    """√72 is 8.485, and in bfloat16 8.5."""
    save_model(tmp_path, Gemma3ForCausalLM, head_dim=16, hidden_size=72)
    model = make_engine(tmp_path, dtype="bfloat16")._model.model
    assert model.embedding_scale == 8.5
    assert model.model.norm.weight.dtype == torch.float32
    assert make_engine(tmp_path)._model.model.embedding_scale == pytest.approx(72**0.5)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention true"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types chunked_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "longrope"}}}, "'longrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "'longrope'"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    save_model(tmp_path, Gemma3ForCausalLM, head_dim=16)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)
