"""Quantized weights approximate the dense ones, and are computed as their dequantized values."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from benchmarks.harness.engines import make_engine
from kernels.cpu.library import load_library, variants
from kernels.cpu.packing import NativeLibrary
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import TorchLM
from services.worker.layers.linear import Linear
from services.worker.layers.weights import Dense, Quantized
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.startup.choose_backend import choose_kernels
from services.worker.startup.loaded_model import load
from services.worker.startup.plan_memory import estimate_requirements
from services.worker.weights.dummy import make_dummy
from services.worker.weights.load import build_model, load_model, quantize
from services.worker.weights.online import ONLINE, Quantization
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig
from tests.services.worker.builds import each_variant
from tests.services.worker.checkpoints import (
    assert_greedy,
    quantized,
    random_prompts,
    save_mimo,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.test_memory import planned_bytes
from tests.services.worker.test_native import furthest, make_config, make_model, run
from tests.services.worker.test_native import random_prompts as native_prompts

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU, DTYPE = torch.device("cpu"), torch.float32
QUANTIZATIONS: tuple[Quantization, ...] = tuple(ONLINE)
SHAPES = (
    "Qwen2, biases",
    "ERNIE, interleaved, biases everywhere",
    "OLMo 2, heads normed together",
    "Qwen2-MoE, a gate, a dense layer",
)


def linears(model: DecoderLM) -> list[Linear]:
    return [module for module in model.modules() if isinstance(module, Linear)]


def in_form(quantization: Quantization, name: str, dtype: torch.dtype) -> DecoderLM:
    model = make_model(make_config(name), dtype)
    for linear in linears(model):
        quantize(linear, quantization)
    return model


def in_float32(model: DecoderLM) -> DecoderLM:
    """``model`` with the same weights, dense or quantized, computed in float32."""
    for linear in linears(model):
        if not isinstance(linear.weight, Dense):
            linear.weight.dtype = torch.float32
    return model.float()


def stands_for(model: DecoderLM) -> DecoderLM:
    """``model`` with dequantized weights."""
    for linear in linears(model):
        values = linear.weight.values
        linear.weight = Dense(linear.outputs, linear.inputs, values.dtype)
        linear.weight.values.copy_(values)
    return model


def test_every_form_that_can_be_asked_for_is_there() -> None:
    asked = get_args(WorkerConfig.model_fields["quantization"].annotation)
    assert set(asked) == set(get_args(Quantization)) == {"none", *ONLINE}


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_folders_linear_layers_are_quantised_and_nothing_else(
    tmp_path: Path, quantization: Quantization
) -> None:
    save_mimo(tmp_path)
    config = read_model_config(tmp_path)

    def load(quantization: Quantization) -> DecoderLM:
        return load_model(
            tmp_path, config, torch.float32, CPU, lambda *_: None, quantization=quantization
        )

    plain, found = load("none"), load(quantization)
    assert len(linears(found)) == 3 * 4 + 4 + 2  # three layers, and the head's with its projections
    for one, other in zip(linears(plain), linears(found), strict=True):
        assert isinstance(one.weight, Dense)
        parts = one.weight.values.split(one.sizes)
        expected = torch.cat([ONLINE[quantization](part).values for part in parts])
        assert torch.equal(other.weight.values, expected)
    codes = [path for path, module in found.named_modules() if isinstance(module, Quantized)]
    assert len(codes) == len(linears(found))
    before, after = dict(plain.named_parameters()), dict(found.named_parameters())
    assert before.keys() - after.keys() == {f"{path}.values" for path in codes}
    for name in before.keys() & after.keys():
        assert torch.equal(before[name], after[name]), name


def by_native_code(variant: str) -> Callable[[DecoderLM, torch.dtype], NativeLM]:
    def build(model: DecoderLM, dtype: torch.dtype) -> NativeLM:
        return NativeLM(model, 16, NativeLibrary(load_library(variant), dtype, 2))

    return build


BACKENDS: dict[str, Callable[..., Any]] = {
    "torch": lambda model, dtype: TorchLM(model),
    **{variant: by_native_code(variant) for variant in variants()},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_logits_match_dequantized_weights(
    quantization: Quantization, name: str, backend: str
) -> None:
    config, prompts, dtype = make_config(name), native_prompts(1, 17, 130, 400), torch.float32
    model = in_form(quantization, name, dtype)
    expected = run(
        TorchLM(stands_for(in_form(quantization, name, dtype))), config, dtype, prompts, 90
    )
    found = run(BACKENDS[backend](model, dtype), config, dtype, prompts, 90)
    assert furthest(found, expected) < 1e-4
    plain = run(TorchLM(make_model(config, dtype)), config, dtype, prompts, 90)
    assert furthest(found, plain) > 1e-3


@each_variant
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_bfloat16_logits_are_nearer_to_float32_than_torchs(
    quantization: Quantization, variant: str
) -> None:
    """Codes are exact in bfloat16, dequantized values are not."""
    name, dtype = "Qwen2, biases", torch.bfloat16
    config, prompts = make_config(name), native_prompts(1, 17, 130, 400)
    exact = run(
        TorchLM(in_float32(in_form(quantization, name, dtype))), config, torch.float32, prompts, 300
    )
    torchs = run(TorchLM(in_form(quantization, name, dtype)), config, dtype, prompts, 300)
    native = by_native_code(variant)(in_form(quantization, name, dtype), dtype)
    found = run(native, config, dtype, prompts, 300)
    assert furthest(found, exact, torch.Tensor.mean) < furthest(torchs, exact, torch.Tensor.mean)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "name", ["ERNIE, interleaved, biases everywhere", "Qwen2-MoE, a gate, a dense layer"]
)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_tokens_logits_are_the_same_bits_whatever_shares_its_step(
    quantization: Quantization, name: str, variant: str, dtype: torch.dtype
) -> None:
    config, prompts = make_config(name), native_prompts(300, 35, 1, 9)
    model = by_native_code(variant)(in_form(quantization, name, dtype), dtype)
    expected = run(model, config, dtype, prompts, 1000)
    for chunk_size in (1, 7, 16):
        found = run(model, config, dtype, prompts, chunk_size)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_size


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("kernels", ["native", "torch", "device"])
def test_texts_match_transformers_with_dequantized_weights(
    checkpoint: Path, oracle: Any, kernels: str, quantization: Quantization
) -> None:
    engine = make_engine(checkpoint, kernels, quantization=quantization)
    prompts = random_prompts(5)
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    with quantized(oracle, quantization):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_while_a_model_is_loaded_one_layer_has_numbers(
    tmp_path: Path, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are empty or quantized."""
    save_mimo(tmp_path)
    config = read_model_config(tmp_path)
    seen: list[Linear] = []
    dense: list[Callable[[], torch.Tensor | None]] = []
    allocate = Linear.allocate

    def watch(linear: Linear, device: torch.device) -> None:
        assert linear.weight.values.is_meta
        assert all(isinstance(each.weight, Quantized) for each in seen)
        assert all(values() is None for values in dense)
        seen.append(linear)
        allocate(linear, device)
        dense.append(weakref.ref(linear.weight.values))

    monkeypatch.setattr(Linear, "allocate", watch)
    assert all(each.weight.values.is_meta for each in linears(build_model(config, DTYPE, CPU)))
    model = load_model(tmp_path, config, DTYPE, CPU, lambda *_: None, quantization=quantization)
    assert seen == linears(model)
    seen.clear()
    assert set(linears(make_dummy(config, DTYPE, CPU, quantization))) == set(seen)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_buffers_of_torchs_operators_are_counted(
    checkpoint: Path, quantization: Quantization
) -> None:
    """A weight is dequantized anew in each step."""
    peaks = []
    for kernels in ("torch", "native"):
        config = WorkerConfig(
            model=str(checkpoint),
            device="cpu",
            dtype="float32",
            quantization=quantization,
            native_kernels=kernels == "native",
        )
        loaded = load(config, lambda *_: None, choose_kernels)
        peaks.append(estimate_requirements(loaded).peak)
    assert peaks[0] - peaks[1] == 2 * 96 * 64 * 8  # gates and ups, each element twice in float32


@pytest.mark.parametrize(
    ("form", "bits", "num_scale_bytes"), [("wint8", 8, 4), ("wint4", 4.5, 0), ("nf4", 4.25, 0)]
)
def test_packed_layers_take_the_memory_of_their_codes(
    form: Quantization, bits: float, num_scale_bytes: int
) -> None:
    """Within 3 %. Parts not counted in ``bits`` occur once per output."""
    config = read_model_config(EMBEDDED_MODEL)
    layers = linears(build_model(config, torch.bfloat16, torch.device("meta")))
    sizes = [(each.outputs, each.inputs) for each in layers]
    expected = sum(outputs * (inputs * bits / 8 + num_scale_bytes) for outputs, inputs in sizes)
    dense = 2 * sum(outputs * inputs for outputs, inputs in sizes)
    taken = []
    for quantization in ("none", form):
        make_engine(EMBEDDED_MODEL, "native", quantization=quantization, dtype="bfloat16")
        taken.append(planned_bytes("weights") or 0)
    assert taken[1] - taken[0] + dense == pytest.approx(expected, rel=0.03)
