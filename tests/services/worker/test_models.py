"""Each model family against transformers: logits of a forward pass over the paged cache."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.harness.engines import make_engine
from benchmarks.harness.oracle import load_as_qwen2, true_logits
from services.worker.layers.context import current_context
from services.worker.models.registry import read_model_config
from services.worker.weights.load import load_model
from shared.model_folder import EMBEDDED_MODEL
from tests.services.worker.checkpoints import (
    assert_greedy,
    oracle_of,
    random_prompts,
    save_mimo,
    save_qwen2,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.forward import our_logits

CPU = torch.device("cpu")


@pytest.mark.parametrize("tie_word_embeddings", [False, True])
@pytest.mark.parametrize("rope_theta", [100.0, 1e6])
def test_qwen2_has_the_logits_of_transformers(
    tmp_path: Path, tie_word_embeddings: bool, rope_theta: float
) -> None:
    rope = {"rope_type": "default", "rope_theta": rope_theta}
    save_qwen2(tmp_path, tie_word_embeddings=tie_word_embeddings, rope_parameters=rope)
    oracle = oracle_of(tmp_path)
    prompts = random_prompts(6)
    for prompt, ours in zip(prompts, our_logits(tmp_path, prompts, torch.float32), strict=True):
        np.testing.assert_allclose(ours, true_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


def test_bfloat16_stays_near_the_logits_of_float32(
    checkpoint: Path, oracle: Qwen2ForCausalLM
) -> None:
    """Three layers of eight-bit mantissas: within 3 % of the logits' spread on average."""
    prompts = random_prompts(6)
    for prompt, ours in zip(prompts, our_logits(checkpoint, prompts, torch.bfloat16), strict=True):
        true = true_logits(oracle, prompt)
        assert np.abs(ours - true).mean() < 0.03 * true.std()


def test_mimo_is_qwen2_with_further_layers(tmp_path: Path, checkpoint: Path) -> None:
    mtp = save_mimo(tmp_path, num_mtp_layers=2)
    prompts = random_prompts(3)
    for ours, qwen2 in zip(
        our_logits(tmp_path, prompts, torch.float32),
        our_logits(checkpoint, prompts, torch.float32),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, qwen2)
    config = read_model_config(tmp_path)
    model = load_model(tmp_path, config, torch.float32, CPU, lambda text, fraction: None)
    for layer in range(2):
        prefix = f"model.mtp_layers.{layer}."
        halves: list[torch.Tensor] = [
            model.get_parameter(f"{prefix}{name}_proj.weight.values")
            for name in ("hidden", "token")
        ]
        torch.testing.assert_close(torch.cat(halves, 1), mtp[prefix + "input_proj.weight"])
        biases = [mtp[f"{prefix}self_attn.{name}_proj.bias"] for name in "qkv"]
        merged = model.get_parameter(prefix + "self_attn.qkv_proj.bias")
        torch.testing.assert_close(merged, torch.cat(biases))


def test_the_embedded_model_continues_as_transformers_does() -> None:
    oracle = load_as_qwen2(EMBEDDED_MODEL)
    prompt = np.random.default_rng(0).integers(300, oracle.config.vocab_size, 40).tolist()
    engine = make_engine(EMBEDDED_MODEL, max_model_len=128, max_num_seqs=2)
    (text,) = Driver(engine, [17]).run([Job(prompt)])
    assert_greedy(oracle, prompt, text)


def test_attention_outside_of_a_forward_pass_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no forward pass"):
        current_context()
