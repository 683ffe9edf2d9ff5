"""gpt-oss as it is published: its experts in MXFP4."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssForCausalLM, PreTrainedModel
from transformers.utils.quantization_config import Mxfp4Config

from benchmarks.harness.engines import KERNELS, make_engine
from benchmarks.harness.oracle import true_logits
from services.worker.layers.experts import Experts
from services.worker.layers.weights import Dense, Quantized
from services.worker.models.registry import read_model_config
from services.worker.weights.load import load_model
from services.worker.weights.online import ONLINE, Quantization
from shared.errors import ConfigError
from tests.services.worker.checkpoints import (
    assert_greedy,
    change_config,
    quantized,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.forward import our_logits
from tests.services.worker.stored_codes import save_mxfp4_experts
from tests.services.worker.test_families import OSS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    save_model(folder, GptOssForCausalLM, **OSS)
    return folder


@pytest.fixture(scope="module")
def folder(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    save_mxfp4_experts(dense, folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    plain = Mxfp4Config(dequantize=True)
    options = {"quantization_config": plain, "dtype": torch.float32}
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, **options)
    return oracle.eval()


@pytest.mark.parametrize("kernels", KERNELS)
def test_logits_match_transformers(folder: Path, oracle: PreTrainedModel, kernels: str) -> None:
    prompts = random_prompts(6)
    logits = our_logits(folder, prompts, torch.float32, kernels)
    for prompt, ours in zip(prompts, logits, strict=True):
        np.testing.assert_allclose(ours, true_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", [*KERNELS, pytest.param("device", marks=pytest.mark.slow)])
def test_texts_match_transformers(folder: Path, oracle: PreTrainedModel, kernels: str) -> None:
    prompts = random_prompts(8)
    texts = Driver(make_engine(folder, kernels), [3, 7, 1, 5], seed=1).run(
        [Job(prompt) for prompt in prompts]
    )
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("kernels", ["native", pytest.param("device", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["wint8", "wint4"])
def test_texts_of_other_forms_match_their_dequantized_values(
    dense: Path, form: Quantization, kernels: str
) -> None:
    prompts = random_prompts(8)
    engine = make_engine(dense, kernels, quantization=form)
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(dense).eval()
    for name, parameter in oracle.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            each = [ONLINE[form](weight).values.T for weight in parameter.data.mT]
            parameter.data = torch.stack(each)
    with quantized(oracle, form):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


def test_experts_keep_their_codes_and_all_else_its_numbers(folder: Path) -> None:
    config = read_model_config(folder)
    model = load_model(folder, config, torch.bfloat16, CPU, lambda *_: None)
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    of_experts = {
        linear.weight
        for layer in experts
        for each in layer.products
        for linear in (each.gate_up_proj, each.down_proj)
    }
    assert len(of_experts) == 3 * 6 * 2
    for name, module in model.named_modules():
        if isinstance(module, Dense | Quantized):
            assert isinstance(module, Quantized) == (module in of_experts), name


def test_configs_as_they_are_published_have_older_keys(tmp_path: Path, folder: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 32.0}
    scaling = yarn | {"beta_slow": 1.0, "original_max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    rope = read_model_config(tmp_path).rope
    change_config(tmp_path, rope_parameters=None, rope_scaling=scaling, rope_theta=150000)
    assert read_model_config(tmp_path).rope == rope
    change_config(tmp_path, rope_scaling=None, rope_theta=None)
    assert read_model_config(tmp_path).rope == rope


def test_a_limit_of_none_is_refused(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    change_config(tmp_path, swiglu_limit=0)
    with pytest.raises(ConfigError, match="swiglu_limit"):
        read_model_config(tmp_path)
