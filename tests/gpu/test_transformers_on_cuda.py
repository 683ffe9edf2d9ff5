"""Logprobs of prompts and outputs on a GPU, compared with transformers on the same GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3ForCausalLM,
)

from benchmarks.harness import scheduled
from benchmarks.harness.oracle import load_as_qwen2
from services.worker.engine.device.engine import DeviceEngine
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import ALL_TOKENS, SamplingParams
from tests.gpu.engines import make_cuda_engine
from tests.services.worker.checkpoints import save_model
from tests.services.worker.driver import Driver, Job
from tests.services.worker.foreign_checkpoints import save_family

pytestmark = pytest.mark.gpu
FLOAT32_TOLERANCE = 1e-3  # of each logprob
BFLOAT16_TOLERANCE = 0.03  # of the logprobs' spread, on average
VOCAB_SIZE = 8192  # of both
PROMPTS = [np.random.default_rng(num).integers(8, VOCAB_SIZE, num).tolist() for num in (2, 17, 90)]
QWEN3 = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_model(folder, Qwen3ForCausalLM, "2GB", **QWEN3)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_embedded_model_has_the_logprobs_of_transformers(dtype: torch.dtype) -> None:
    engine = make_cuda_engine(EMBEDDED_MODEL, dtype=name_of(dtype))
    assert_near(engine, load_as_qwen2(EMBEDDED_MODEL), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_qwen3_of_random_weights_has_the_logprobs_of_transformers(
    qwen3: Path, dtype: torch.dtype
) -> None:
    engine = make_cuda_engine(qwen3, dtype=name_of(dtype))
    assert_near(engine, Qwen3ForCausalLM.from_pretrained(qwen3).eval(), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_windows_have_the_logprobs_of_transformers(tmp_path: Path, dtype: torch.dtype) -> None:
    """Windows smaller than a tile and than most texts."""
    save_model(tmp_path, MistralForCausalLM, vocab_size=VOCAB_SIZE, head_dim=64, sliding_window=20)
    engine = make_cuda_engine(tmp_path, dtype=name_of(dtype))
    assert_near(engine, MistralForCausalLM.from_pretrained(tmp_path).eval(), dtype)


# In bfloat16 transformers may choose other experts.
FOREIGN = [("Gemma2ForCausalLM", torch.bfloat16), ("Phi3ForCausalLM", torch.bfloat16)]
FOREIGN += [
    (name, torch.float32)
    for name in (
        *("Gemma2ForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
        *("MiMoV2FlashForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM"),
    )
]


@pytest.mark.parametrize(("name", "dtype"), FOREIGN, ids=str)
def test_models_computed_by_transformers_have_its_logprobs(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """Recorded where possible."""
    save_family(tmp_path, name, vocab_size=VOCAB_SIZE)
    engine = make_cuda_engine(tmp_path, dtype=name_of(dtype))
    # Some versions of transformers choose scaled_dot_product_attention, which caps no scores.
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert_near(engine, oracle.eval(), dtype)


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Phi3ForCausalLM"])
def test_models_computed_by_transformers_are_recorded_with_equal_texts(
    tmp_path: Path, name: str
) -> None:
    save_family(tmp_path, name)
    params = SamplingParams(seed=3, temperature=0.0, max_tokens=30, ignore_eos=True)
    prompts = [[id % 160 for id in prompt] for prompt in PROMPTS]
    recorded, eager = (
        make_cuda_engine(tmp_path, enforce_eager=is_eager) for is_eager in (False, True)
    )
    assert len(recorded._graphs) > 0
    found, wanted = (scheduled.run(engine, prompts, params) for engine in (recorded, eager))
    assert found.texts == wanted.texts


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def assert_near(engine: DeviceEngine, oracle: Any, dtype: torch.dtype) -> None:
    """``oracle`` computes in float32 with weights rounded to ``dtype``."""
    oracle = oracle.to(dtype).float().cuda()
    logprobs: dict[str, Any] = {"logprobs": ALL_TOKENS, "prompt_logprobs": ALL_TOKENS}
    params = SamplingParams(seed=3, temperature=0.8, max_tokens=6, ignore_eos=True, **logprobs)
    jobs = [Job(prompt, params) for prompt in PROMPTS]
    Driver(engine, chunk_sizes=(13, 1000)).run(jobs)
    for job in jobs:
        of_prompt = [part.values for _, part in job.prompt_parts]
        found = np.concatenate([*of_prompt, *job.logprobs]).reshape(-1, 1 + VOCAB_SIZE)[:, 1:]
        wanted = true_logprobs(oracle, job.prompt + job.emitted)
        differences = np.abs(found - wanted)
        if dtype == torch.float32:
            assert differences.max() < FLOAT32_TOLERANCE
        else:
            assert differences.mean() < BFLOAT16_TOLERANCE * wanted.std()


@torch.inference_mode()
def true_logprobs(oracle: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """[len(ids) - 1, VOCAB_SIZE]: logprobs after each of ``ids`` but the last."""
    logits = oracle(torch.tensor([ids], device="cuda")).logits[0, :-1]
    return logits.float().log_softmax(-1).cpu().numpy()
