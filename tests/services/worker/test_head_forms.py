"""Quantized output heads give the dequantized result in every backend."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.layers.weights import Quantized
from services.worker.models.registry import read_model_config
from services.worker.weights.load import load_model
from services.worker.weights.online import ONLINE, Quantization
from shared.errors import ConfigError
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import (
    assert_greedy,
    quantized,
    random_prompts,
    save_mimo,
    save_model,
)
from tests.services.worker.driver import Driver, Job

CPU = torch.device("cpu")
FORMS = [form if form == "wint8" else pytest.param(form, marks=pytest.mark.slow) for form in ONLINE]


@pytest.mark.parametrize("kernels", ENGINES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
def test_texts_are_those_of_transformers_with_what_the_codes_stand_for(
    tmp_path: Path, form: Quantization, is_tied: bool, kernels: str
) -> None:
    """Embeddings with the head's weights keep their own copy."""
    save_model(tmp_path, LlamaForCausalLM, tie_word_embeddings=is_tied)
    engine = make_engine(tmp_path, kernels, lm_head_quantization=form)
    prompts = random_prompts(5)
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with quantized(oracle, "none", form):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("kernels", ["native", "device"])
def test_with_drafts_texts_are_those_without(tmp_path: Path, kernels: str) -> None:
    """An MTP head shares the output head."""
    save_mimo(tmp_path)
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(8)]
    texts = []
    for method in ("mtp", "none"):
        speculation = {"method": method, "num_speculative_tokens": 2}
        forms = {"quantization": "wint8", "lm_head_quantization": "wint4"}
        engine = make_engine(tmp_path, kernels, speculative_config=speculation, **forms)
        found = scheduled.run(engine, random_prompts(8), params)
        assert (found.num_accepted > 0) == (method == "mtp")
        texts.append(found.texts)
    assert texts[0] == texts[1]


def test_it_is_the_head_alone_that_changes(tmp_path: Path) -> None:
    save_mimo(tmp_path)
    config, quiet = read_model_config(tmp_path), lambda *_: None
    model = load_model(tmp_path, config, torch.bfloat16, CPU, quiet, head="wint8")
    assert model.lm_head is not None
    (form,) = (module for module in model.modules() if isinstance(module, Quantized))
    assert model.lm_head.weight is form


def test_a_model_that_transformers_computes_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaForCausalLM)
    text = "lm-head-quantization: wint8 is for our own architectures"
    with pytest.raises(ConfigError, match=text):
        make_engine(tmp_path, model_impl="transformers", lm_head_quantization="wint8")


def test_a_model_that_pools_has_no_head(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaForCausalLM)
    text = "lm-head-quantization: wint8: a model that pools has no output head"
    with pytest.raises(ConfigError, match=text):
        make_engine(tmp_path, runner="pooling", lm_head_quantization="wint8")
