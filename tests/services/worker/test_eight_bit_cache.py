"""A quantized KV cache: every backend computes with the dequantized values, and twice as much
fits."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from kernels.cpu.library import variants
from kernels.kv_codes import HIGHEST_CODE, dequantize
from kernels.kv_layout import KVLayout, LayerKV
from services.worker.backends.torch_lm import TorchLM
from services.worker.config.model_config import ModelConfig
from services.worker.layers.context import ForwardContext, current_context
from services.worker.models import CausalLM
from services.worker.startup.cache_codes import CACHE_CODES
from shared.settings.worker import WorkerConfig
from tests.services.worker.builds import each_variant
from tests.services.worker.checkpoints import random_prompts, save_mimo
from tests.services.worker.device_contexts import OnDevice
from tests.services.worker.driver import Driver, Job
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.speculation import engine_of, params_of, plain, prompts
from tests.services.worker.test_memory import planned_bytes
from tests.services.worker.test_native import furthest, make_config, make_model, make_native, run
from tests.services.worker.test_native import random_prompts as native_prompts

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU, FLOAT32 = torch.device("cpu"), torch.float32
NAMES = ("int8", "fp8")
codes = pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)
LATENTS = "DeepSeek-V3, latents, yarn"
SHAPES = (
    "Qwen3, three queries a key, tied",
    "Llama, a head of 256, a key for each query",
    "Llama, sixteen queries a key",
    "Gemma 2, windows, caps, tied",
)


def config_of(name: str) -> ModelConfig:
    """With two groups of latents, of different sizes."""
    config = make_config(name)
    return config if name != LATENTS else msgspec.structs.replace(config, kv_lora_rank=176)


def test_every_form_of_the_setting_exists() -> None:
    asked = set(CACHE_CODES)
    annotation = WorkerConfig.model_fields["kv_cache_dtype"].annotation
    assert set(get_args(annotation)) - {"auto"} == asked == {"none", *NAMES}
    assert set(CACHE_CODES.values()) == {None, *HIGHEST_CODE}


@codes
@each_variant
@pytest.mark.parametrize("name", [*SHAPES, LATENTS])
def test_float32_logits_match_torch(name: str, variant: str, codes: torch.dtype) -> None:
    """Except for elements halfway between two codes, decided by the last bits."""
    config, some = config_of(name), native_prompts(1, 17, 130, 700)
    expected = run(TorchLM(make_model(config, FLOAT32)), config, FLOAT32, some, 300, codes=codes)
    native = make_native(config, FLOAT32, variant, 16, 2)
    found = run(native, config, FLOAT32, some, 300, codes=codes)
    assert furthest(found, expected, Tensor.mean) < 2e-4  # Zen 3: 8.2e-5
    assert furthest(found, expected) < 5e-3
    exact = run(native, config, FLOAT32, some, 300)
    assert furthest(found, exact, Tensor.mean) > 1e-3


@pytest.mark.parametrize(
    ("name", "codes"),
    [*(("Mistral, windows", each) for each in HIGHEST_CODE), (LATENTS, torch.uint8)],
    ids=str,
)
def test_logits_do_not_depend_on_the_side_that_knows_the_lengths(
    name: str, codes: torch.dtype
) -> None:
    config, some = config_of(name), native_prompts(1, 17, 131)
    model = TorchLM(make_model(config, FLOAT32))
    expected = run(model, config, FLOAT32, some, 65, codes=codes)
    found = run(OnDevice(model), config, FLOAT32, some, 65, codes=codes)
    assert furthest(found, expected, Tensor.mean) < 5e-5
    assert furthest(found, expected) < 5e-3


@codes
@each_variant
def test_bfloat16_logits_are_nearer_to_float32_than_torchs(
    variant: str, codes: torch.dtype
) -> None:
    """Codes are exact in bfloat16, dequantized values are not."""
    config, dtype = make_config("Qwen2, biases"), torch.bfloat16
    some = native_prompts(1, 17, 130, 400)
    rounded = TorchLM(make_model(config, dtype).float())
    exact = run(rounded, config, FLOAT32, some, 300, codes=codes)
    torchs = run(TorchLM(make_model(config, dtype)), config, dtype, some, 300, codes=codes)
    native = make_native(config, dtype, variant, 16, 2)
    found = run(native, config, dtype, some, 300, codes=codes)
    assert furthest(found, exact, Tensor.mean) < furthest(torchs, exact, Tensor.mean)


@codes
@each_variant
@pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Qwen3, three queries a key, tied", "Mistral, windows", LATENTS])
def test_a_tokens_logits_are_the_same_bits_whatever_shares_its_step(
    name: str, variant: str, dtype: torch.dtype, codes: torch.dtype
) -> None:
    config, some = config_of(name), native_prompts(300, 35, 1, 9)
    model = make_native(config, dtype, variant, 16, 2)
    expected = run(model, config, dtype, some, 1000, codes=codes)
    for chunk_size in (1, 16, 270):
        found = run(model, config, dtype, some, chunk_size, codes=codes)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_size
    (alone,) = run(model, config, dtype, some[:1], 13, codes=codes)
    assert torch.equal(alone, expected[0])


@codes
def test_larger_blocks_change_nothing(codes: torch.dtype) -> None:
    config, some, variant = make_config("Qwen2, biases"), native_prompts(300, 50), variants()[0]
    expected, found = (
        run(
            make_native(config, FLOAT32, variant, size, 1),
            *(config, FLOAT32, some, 90, size),
            codes=codes,
        )
        for size in (16, 128)
    )
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


class Keeping(CausalLM):
    """``model``, and the context of its last step."""

    context: ForwardContext

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self._model, self.clears_blocks = model, model.clears_blocks

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        self.context = current_context()
        return self._model(input_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


def in_order(kv: LayerKV) -> LayerKV:
    """Native code's cache (``cache.h``) in the layout of torch's operators."""
    num_blocks, block_size, _, num_heads, head_dim = kv.entries.shape
    assert kv.scales is not None
    keys, values = kv.entries.reshape(num_blocks, 2, num_heads, block_size // 16, -1).unbind(1)
    keys = keys.unflatten(-1, (head_dim, 16)).permute(0, 2, 4, 1, 3)
    values = values.unflatten(-1, (-1, 16, 16)).permute(0, 2, 4, 1, 3, 5).flatten(4)
    entries = torch.stack((keys, values), 3).flatten(1, 2)
    scales = kv.scales.reshape(num_blocks, 2, num_heads, block_size).permute(0, 3, 1, 2)
    return LayerKV(entries, scales)


@codes
@each_variant
@pytest.mark.parametrize("name", SHAPES[:2])
def test_native_code_writes_the_same_cache_as_torch(
    name: str, variant: str, codes: torch.dtype
) -> None:
    """In the first layer keys and values are nearly equal: some get the next code."""
    config, some = make_config(name), native_prompts(70, 3)
    torchs = Keeping(TorchLM(make_model(config, FLOAT32)))
    native = Keeping(make_native(config, FLOAT32, variant, 32, 2))
    for model in (torchs, native):
        run(model, config, FLOAT32, some, 1000, 32, codes=codes)
    slots = torchs.context.groups[0].slot_mapping
    expected = torchs.context.kv_caches[0]
    found = in_order(native.context.kv_caches[0])
    numbers, scales = [], []
    for kv in (expected, found):
        assert kv.scales is not None
        scales.append(kv.scales.flatten(0, 1)[slots])
        numbers.append(dequantize(kv.entries.flatten(0, 1)[slots], scales[0], FLOAT32))
    torch.testing.assert_close(*scales, atol=0, rtol=1e-5)
    steps = scales[0][..., None] if codes == torch.int8 else numbers[0].abs() / 8
    difference = (numbers[0] - numbers[1]).abs()
    assert (difference <= 1.001 * steps + 1e-6).all()
    assert (difference > 0).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kernels", ENGINES)
def test_more_blocks_fit(tmp_path: Path, kernels: str, name: str, dtype: str) -> None:
    """A byte per element, and a scale for each head; the MTP head's layer too."""
    save_mimo(tmp_path)
    settings: dict[str, Any] = {"dtype": dtype, "kv_cache_memory_bytes": 300_000}
    settings["speculative_config"] = {"method": "mtp"}
    if kernels == "device":  # a step's memory is not measured on a CPU
        settings["num_gpu_blocks_override"] = settings.pop("kv_cache_memory_bytes") // 1000
    plain, engine = (
        make_engine(tmp_path, kernels, kv_cache_dtype=each, **settings) for each in ("auto", name)
    )
    assert engine.model_info.kv_cache_dtype == name
    num_blocks, block_size = engine.capacity.num_blocks, engine.capacity.block_size
    token_bytes = 4 * 2 * 2 * (16 + 4)
    assert planned_bytes("kv_cache") == num_blocks * block_size * token_bytes
    if kernels != "device":
        assert num_blocks == 300_000 // (block_size * token_bytes)
        gained = 16 * getattr(torch, dtype).itemsize / (16 + 4)
        assert num_blocks / plain.capacity.num_blocks == pytest.approx(gained, rel=0.05)


@pytest.mark.parametrize(
    ("kernels", "name", "num"),
    [
        ("native", "int8", 12),
        pytest.param("native", "fp8", 12, marks=pytest.mark.slow),
        pytest.param("torch", "int8", 3, marks=pytest.mark.slow),
        pytest.param("device", "fp8", 3, marks=pytest.mark.slow),
    ],
)
def test_texts_are_the_same_with_drafts_and_after_preemption(
    kernels: str, name: str, num: int
) -> None:
    """Blocks for two of the longest; prompts in chunks that end within blocks."""
    some, params = prompts()[-num:], params_of(0.7, num)
    expected = scheduled.run(plain(kernels, kv_cache_dtype=name), some, params)
    drafting = engine_of(kernels, "mtp", 3, kv_cache_dtype=name)
    assert scheduled.run(drafting, some, params).texts == expected.texts
    num_blocks = 256 // ENGINES[kernels]["block_size"]
    limits = {"num_gpu_blocks_override": num_blocks, "max_num_batched_tokens": 39}
    tight = engine_of(kernels, "mtp", 3, kv_cache_dtype=name, **limits)
    squeezed = scheduled.run(tight, some, params, caches_prefixes=True, max_open=8)
    assert squeezed.texts == expected.texts
    assert squeezed.num_accepted > 0
    assert squeezed.num_resumed > 0 or num < 12


@pytest.mark.parametrize("kernels", ["torch", pytest.param("device", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_models_of_transformers_keep_codes_too(tmp_path: Path, kernels: str, name: str) -> None:
    """Layers with a window have twice the KV heads of the others. Most first tokens equal those
    without quantization."""
    save_family(tmp_path, "MiMoV2FlashForCausalLM")
    plain, engine = (make_engine(tmp_path, kernels, kv_cache_dtype=each) for each in ("auto", name))
    some = random_prompts(12)
    whole = Driver(engine).run([Job(prompt) for prompt in some])
    assert Driver(engine, [3, 7, 1, 5], seed=2).run([Job(prompt) for prompt in some]) == whole
    exact = Driver(plain).run([Job(prompt) for prompt in some])
    assert np.mean([one[0] == other[0] for one, other in zip(whole, exact, strict=True)]) > 0.8


def test_a_cache_without_its_scales_is_an_error() -> None:
    config = make_config(SHAPES[0])
    layouts = [KVLayout((2, 2, 48), FLOAT32, torch.int8), KVLayout((2, 2, 48), FLOAT32)]
    native = make_native(config, FLOAT32, variants()[0], 16, 1)
    with pytest.raises(ValueError, match="mixed KV caches"):
        run(native, config, FLOAT32, native_prompts(3), 3, layouts=layouts)


def test_another_form_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"kv_cache_dtype\n.*'auto', 'none', 'int8' or 'fp8'"):
        WorkerConfig.model_validate({"kv_cache_dtype": "fp8_e5m2"})
