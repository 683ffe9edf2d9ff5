"""Quantized checkpoints are computed as their dequantized weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from services.worker.layers.linear import Linear
from services.worker.layers.weights import Dense, Quantized
from services.worker.models.registry import read_model_config
from services.worker.weights.load import load_model
from shared.errors import ConfigError
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import (
    assert_greedy,
    change_config,
    random_prompts,
    save_mimo,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.stored_codes import LAYOUTS, MORE_LAYOUTS, save_quantized
from tests.services.worker.test_families import CASES

FAMILIES = ("llama", "qwen3", "ernie", "llama, no groups, biases", "qwen3 moe")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp("dense")
    save_model(folder, family, **changes)
    return folder


def with_values(dense: Path, values: dict[str, torch.Tensor], folder: Path) -> PreTrainedModel:
    """The model of ``dense`` with other weights, written to ``folder``."""
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    floats = {name: tensor.float().contiguous() for name, tensor in values.items()}
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    oracle: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return oracle.eval()


@pytest.mark.parametrize("kernels", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dense", FAMILIES, indirect=True, scope="module")
def test_texts_match_transformers_with_dequantized_weights(
    dense: Path, layout: str, kernels: str, tmp_path: Path
) -> None:
    values = save_quantized(dense, tmp_path / "codes", LAYOUTS[layout])
    oracle = with_values(dense, values, tmp_path / "values")
    engine = make_engine(tmp_path / "codes", kernels)
    prompts = random_prompts(6)
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_other_layouts_and_files_next_to_the_config_are_read(tmp_path: Path, layout: str) -> None:
    family, changes = CASES["qwen3 moe"]
    save_model(tmp_path / "dense", family, **changes)
    values = save_quantized(tmp_path / "dense", tmp_path / "codes", MORE_LAYOUTS[layout])
    oracle = with_values(tmp_path / "dense", values, tmp_path / "values")
    prompts = random_prompts(8)
    engine = make_engine(tmp_path / "codes")
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("kernels", ["native", "device"])
def test_with_drafts_texts_match_runs_without(tmp_path: Path, kernels: str) -> None:
    """At a high temperature even drafts of a random head are often accepted."""
    save_mimo(tmp_path / "dense")
    save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS["awq"])
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(8)]
    texts = []
    for method in ("mtp", "none"):
        speculation = {"method": method, "num_speculative_tokens": 2}
        engine = make_engine(tmp_path / "codes", kernels, speculative_config=speculation)
        found = scheduled.run(engine, random_prompts(8), params)
        assert (found.num_accepted > 0) == (method == "mtp")
        texts.append(found.texts)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_projection_keeps_its_codes(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a head's; only a cut order of inputs makes it dense. The others hold no dense
    weights."""
    allocated: list[Linear] = []
    allocate = Linear.allocate

    def watch(linear: Linear, device: torch.device) -> None:
        allocated.append(linear)
        allocate(linear, device)

    monkeypatch.setattr(Linear, "allocate", watch)
    save_mimo(tmp_path / "dense", rope_theta=1e4)
    values = save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS[layout])
    config = read_model_config(tmp_path / "codes")
    model = load_model(tmp_path / "codes", config, torch.float32, CPU, lambda *_: None)
    linears = {name: each for name, each in model.named_modules() if isinstance(each, Linear)}
    is_cut = {name for name in linears if name.endswith(("hidden_proj", "token_proj"))}
    assert len(linears) == 3 * 4 + 4 + len(is_cut)
    for name, linear in linears.items():
        is_dense = layout == "gptq, desc_act" and name in is_cut
        assert isinstance(linear.weight, Dense if is_dense else Quantized), name
        assert (linear in allocated) == is_dense
    both = values["model.mtp_layers.0.input_proj.weight"]
    found = [
        linears[f"model.mtp_layers.0.{name}_proj"].weight.values for name in ("hidden", "token")
    ]
    assert torch.equal(torch.cat(found, 1), both)


def test_a_product_of_layers_that_are_quantised_in_different_ways_is_dense(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", CASES["llama"][0])
    layout = LAYOUTS["awq"]
    values = save_quantized(tmp_path / "dense", tmp_path / "codes", layout)
    file = tmp_path / "codes" / "model.safetensors"
    tensors = load_file(file)
    layer = "model.layers.1.self_attn.k_proj."
    others = {name: each for name, each in tensors.items() if not name.startswith(layer)}
    save_file(others | {f"{layer}weight": values[f"{layer}weight"]}, file)
    config = read_model_config(tmp_path / "codes")
    model: Any = load_model(tmp_path / "codes", config, torch.float32, CPU, lambda *_: None)
    weight = model.model.layers[1].self_attn.qkv_proj.weight
    assert isinstance(weight, Dense)
    names = ("q_proj", "k_proj", "v_proj")
    expected = [values[f"model.layers.1.self_attn.{name}.weight"] for name in names]
    assert torch.equal(weight.values, torch.cat(expected))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj.weight, Quantized)


@pytest.fixture
def codes(tmp_path: Path) -> Path:
    save_model(tmp_path / "dense", CASES["llama"][0])
    save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS["awq"])
    return tmp_path / "codes"


def test_codes_are_not_quantised_again(codes: Path) -> None:
    with pytest.raises(ConfigError, match="quantization: wint8 is made of dense weights; those of"):
        make_engine(codes, quantization="wint8")


def test_dummy_weights_have_no_codes(codes: Path) -> None:
    with pytest.raises(ConfigError, match="load-format: dummy makes dense weights"):
        make_engine(codes, load_format="dummy")


def test_biases_of_zeros_that_gptq_adds_do_not_matter(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", CASES["llama"][0])
    folder = tmp_path / "codes"
    save_quantized(tmp_path / "dense", folder, LAYOUTS["gptq"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file(tensors | {name: torch.zeros(64)}, folder / "model.safetensors")
    config = read_model_config(folder)
    load_model(folder, config, torch.float32, CPU, lambda *_: None)
    save_file(tensors | {name: torch.ones(64)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"the architecture has no tensor {name}"):
        load_model(folder, config, torch.float32, CPU, lambda *_: None)


def test_layers_of_other_sizes_are_refused(codes: Path) -> None:
    change_config(codes, intermediate_size=64)
    text = r"layer model.layers.0.mlp.gate_proj is quantised and \[96, 64\]; .* has \[64, 64\]"
    with pytest.raises(ConfigError, match=text):
        make_engine(codes)
