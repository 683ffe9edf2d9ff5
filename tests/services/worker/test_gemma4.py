"""Gemma 4 in every engine: quantized weights and caches, prefix hits, preemption, published names
and sizes of heads."""

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, KERNELS, make_engine
from kernels.cpu.library import load_library
from kernels.cpu.packing import NativeLibrary
from kernels.kv_codes import HIGHEST_CODE
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import TorchLM
from services.worker.gemma4.config import Gemma4Config
from services.worker.gemma4.model import Gemma4ForCausalLM
from services.worker.layers.parallel import Parallel
from services.worker.layers.stage import Stage
from services.worker.layers.weights import Quantized
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.weights.load import build_model
from services.worker.weights.online import ONLINE, Quantization
from shared.errors import ConfigError
from shared.model_folder import weight_files
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.builds import each_variant
from tests.services.worker.checkpoints import (
    assert_greedy,
    change_config,
    oracle_of,
    quantized,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.forward import our_logits
from tests.services.worker.gemma4 import FULL, GEMMA4, SLIDING
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_dropped_blocks import MAX_LEN, Case, check
from tests.services.worker.test_families import assert_same_logits
from tests.services.worker.test_gemma import long_prompts
from tests.services.worker.test_native import VOCAB_SIZE as NATIVE_VOCAB_SIZE
from tests.services.worker.test_native import furthest, make_model, run
from tests.services.worker.test_native import random_prompts as native_prompts
from tests.services.worker.test_quantized_models import with_values

DENSE, SHARED = "gemma 4", "gemma 4, inputs of layers, shared keys and values"
EXPERTS, WITH_IMAGES = "gemma 4, experts", "gemma 4 with images"
slow = pytest.mark.slow


def save(folder: Path, name: str, **changes: Any) -> None:
    family, shape = GEMMA4[name]
    save_model(folder, family, "10MB", **(shape | changes))


@contextmanager
def with_codes(oracle: PreTrainedModel, form: Quantization) -> Iterator[None]:
    """``quantized``, for experts too, and without the routers."""
    routers = {name: each.clone() for name, each in oracle.named_parameters() if "router" in name}
    with quantized(oracle, form):
        for name, each in oracle.named_parameters():
            if "experts." in name:
                each.data = torch.stack([ONLINE[form](one).values for one in each.data])
            if name in routers:
                each.data = routers[name]
        yield


@pytest.mark.parametrize(
    ("name", "form", "kernels"),
    [
        (SHARED, "wint4", "torch"),
        (DENSE, "wint8", "native"),
        (EXPERTS, "wint4", "native"),
        (SHARED, "wint8", "device"),
        pytest.param(DENSE, "wint8", "torch", marks=slow),
        pytest.param(EXPERTS, "wint8", "torch", marks=slow),
        pytest.param(SHARED, "wint4", "native", marks=slow),
        pytest.param(DENSE, "wint4", "device", marks=slow),
        pytest.param(EXPERTS, "wint4", "device", marks=slow),
    ],
)
def test_texts_match_transformers_with_dequantized_weights(
    tmp_path: Path, name: str, form: Quantization, kernels: str
) -> None:
    save(tmp_path, name)
    oracle = oracle_of(tmp_path)
    engine = make_engine(tmp_path, kernels, quantization=form)
    prompts = [*random_prompts(4), *long_prompts(2)]
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    with with_codes(oracle, form):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of experts as tools that quantize them write them."""
    found = {}
    for name, each in tensors.items():
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".experts"):
            found[name] = each
            continue
        for number, expert in enumerate(each):
            parts = expert.chunk(2) if kind == "gate_up_proj" else [expert]
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, weight in zip(names, parts, strict=True):
                found[f"{experts}.{number}.{part}.weight"] = weight.contiguous()
    return found


def in_stacks(values: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """The reverse: tensors by ``names``."""
    found = {}
    for name in names:
        experts, _, kind = name.rpartition(".")
        if not experts.endswith(".experts"):
            found[name] = values[name]
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        num = sum(each.startswith(experts) and "down_proj" in each for each in values)
        found[name] = torch.stack(
            [
                torch.cat([values[f"{experts}.{number}.{part}.weight"] for part in parts])
                for number in range(num)
            ]
        )
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (DENSE, "compressed-tensors"),
        pytest.param(SHARED, "fp8", marks=slow),
        (EXPERTS, "fp8"),
        pytest.param(WITH_IMAGES, "awq", marks=slow),
    ],
)
def test_a_checkpoint_may_be_quantized(
    tmp_path: Path, name: str, layout: str, kernels: str
) -> None:
    """Its experts are stored one by one."""
    save(tmp_path / "dense", name)
    (file,) = weight_files(tmp_path / "dense")
    tensors = load_file(file)
    save_file(one_by_one(tensors), file)
    values = save_quantized(tmp_path / "dense", tmp_path / "codes", LAYOUTS[layout])
    oracle = with_values(tmp_path / "dense", in_stacks(values, tensors), tmp_path / "values")
    engine = make_engine(tmp_path / "codes", kernels)
    if kernels == "native":
        assert isinstance(engine._model, NativeLM)
    else:
        assert any(isinstance(each, Quantized) for each in engine._model.modules())
    prompts = random_prompts(6)
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("kernels", KERNELS)
def test_embeddings_of_layers_may_be_codes(tmp_path: Path, kernels: str) -> None:
    save(tmp_path, SHARED)
    oracle, prompts = oracle_of(tmp_path), random_prompts(4)
    engine = make_engine(tmp_path, kernels, embedding_quantization="wint8")
    texts = Driver(engine).run([Job(prompt) for prompt in prompts])
    for name, each in oracle.named_parameters():
        if "embed_tokens" in name:
            each.data = ONLINE["wint8"](each.data).values
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize(
    ("name", "kernels"),
    only(
        [(SHARED, "torch"), (EXPERTS, "native")],
        *([DENSE, SHARED, EXPERTS], KERNELS),
    ),
)
def test_texts_are_the_same_alone_and_in_chunks(tmp_path: Path, name: str, kernels: str) -> None:
    save(tmp_path, name)
    oracle, prompts = oracle_of(tmp_path), long_prompts(2)
    engine = make_engine(tmp_path, kernels)
    crowd = [Driver(engine, [size]).run([Job(each) for each in prompts]) for size in (1, 7, 64)]
    alone = [Driver(engine, [64]).run([Job(each)])[0] for each in prompts]
    for texts in (*crowd, alone):
        for prompt, text in zip(prompts, texts, strict=True):
            assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize(
    ("name", "kernels", "cache"),
    [
        pytest.param(SHARED, "device", "int8", marks=slow),
        (SHARED, "native", "int8"),
        (DENSE, "native", "fp8"),
        (EXPERTS, "native", "auto"),
        pytest.param(SHARED, "torch", "auto", marks=slow),
        pytest.param(DENSE, "device", "auto", marks=slow),
        pytest.param(DENSE, "torch", "fp8", marks=slow),
        pytest.param(EXPERTS, "torch", "auto", marks=slow),
    ],
)
def test_texts_are_the_same_after_prefix_hits_and_preemption(
    tmp_path: Path, name: str, kernels: str, cache: str
) -> None:
    """Blocks for two of the longest; chunks that end within blocks."""
    save(tmp_path, name)
    prompts = long_prompts(8)
    params = SamplingParams(seed=1, temperature=0.7, max_tokens=24, ignore_eos=True)
    settings: dict[str, Any] = {"kv_cache_dtype": cache, "max_model_len": 112}
    expected = scheduled.run(make_engine(tmp_path, kernels, **settings), prompts, params)
    settings["num_gpu_blocks_override"] = 224 // ENGINES[kernels]["block_size"]
    tight = make_engine(tmp_path, kernels, max_num_batched_tokens=39, **settings)
    squeezed = scheduled.run(tight, prompts, params, caches_prefixes=True, max_open=6)
    assert squeezed.texts == expected.texts
    assert squeezed.num_hits > squeezed.num_resumed > 0


@pytest.mark.parametrize(
    ("name", "case"),
    [
        (SHARED, Case("native", "bfloat16", "int8", num_at_once=3)),
        (DENSE, Case("native", "float32", "fp8", "ngram")),
        (EXPERTS, Case("torch", num_at_once=3)),
        pytest.param(SHARED, Case("torch", "bfloat16", "auto", "ngram", 3), marks=slow),
        pytest.param(DENSE, Case("native", "bfloat16"), marks=slow),
        pytest.param(EXPERTS, Case("torch", "float32", "int8"), marks=slow),
    ],
    ids=str,
)
def test_dropped_blocks_are_not_missed(
    tmp_path: Path, name: str, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with a window have the larger entries, but smaller ones where layers are shared."""
    kinds = [*[SLIDING] * 4, FULL, SLIDING, FULL]
    of_shared: dict[str, Any] = {"num_hidden_layers": len(kinds), "layer_types": kinds}
    changes = of_shared if name == SHARED else {"num_key_value_heads": 4}
    save(tmp_path, name, max_position_embeddings=MAX_LEN, **changes)
    assert check(tmp_path, case, monkeypatch, resume_every=5).num_hits > 5


def test_shared_layers_have_no_cache(tmp_path: Path) -> None:
    """Four layers, of which two read the others' entries; heads of two sizes."""
    save(tmp_path, SHARED)
    model = build_model(read_model_config(tmp_path), torch.float32, torch.device("meta"))
    entries = [each.entry for each in model.kv_layouts(torch.float32, drafts=False)]
    assert entries == [(2, 2, 16), (2, 2, 32)]


@pytest.mark.parametrize("kernels", KERNELS)
def test_published_sizes_of_heads(tmp_path: Path, kernels: str) -> None:
    """With short queries, since high scores magnify rounding."""
    sizes = {"head_dim": 256, "global_head_dim": 512, "hidden_size": 96, "initializer_range": 0.1}
    save(tmp_path, DENSE, **sizes)
    (file,) = weight_files(tmp_path)
    tensors = load_file(file)
    shorter = {name: each * 0.25 for name, each in tensors.items() if "q_norm" in name}
    save_file(tensors | shorter, file, {"format": "pt"})
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert_same_logits(tmp_path, oracle, kernels)


def test_published_keys_of_sizes_are_read(tmp_path: Path) -> None:
    """Instead of transformers' sizes of each layer."""
    save(tmp_path, DENSE)
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = config["per_layer_config"]["1"]
    assert sizes == {"head_dim": 32, "num_key_value_heads": 1}
    published = {"global_head_dim": 32, "num_global_key_value_heads": 1}
    prompts = random_prompts(3)
    expected = our_logits(tmp_path, prompts, torch.float32)
    change_config(tmp_path, per_layer_config=None, **published)
    found = our_logits(tmp_path, prompts, torch.float32)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_tensors_of_images_and_sounds_are_left_out(tmp_path: Path) -> None:
    """A text model with the published names of one with images."""
    save(tmp_path, WITH_IMAGES)
    (file,) = weight_files(tmp_path)
    tensors = load_file(file)
    assert any(name.startswith("model.language_model.layers.") for name in tensors)
    prompts = random_prompts(3)
    expected = our_logits(tmp_path, prompts, torch.float32)
    more = ("audio_tower.a.weight", "embed_audio.b.weight", "vision_embedder.patch_dense.weight")
    save_file(tensors | {f"model.{name}": torch.zeros(2) for name in more}, file)
    found = our_logits(tmp_path, prompts, torch.float32)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("layout", ["dense", "compressed-tensors"])
def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path: Path, layout: str) -> None:
    """Published files have unused ones."""
    folder = tmp_path / layout
    save(tmp_path / "dense", SHARED)
    if layout != "dense":
        save_quantized(tmp_path / "dense", folder, LAYOUTS[layout])
    file = folder / "model.safetensors"
    tensors, prompts = load_file(file), random_prompts(3)
    expected = our_logits(folder, prompts, torch.float32)
    for name in [*tensors]:
        layer, place, part = name.partition(".self_attn.")
        if layer in ("model.layers.0", "model.layers.1") and part.startswith(("k_", "v_")):
            tensors[f"model.layers.{int(layer[-1]) + 2}{place}{part}"] = tensors[name].clone()
    save_file(tensors, file)
    found = our_logits(folder, prompts, torch.float32)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [DENSE, SHARED])
def test_only_a_model_whose_layers_stand_alone_has_stages(tmp_path: Path, name: str) -> None:
    save(tmp_path, name)
    parallel = Parallel(0, 1, stage=Stage(0, 2))
    model = build_model(read_model_config(tmp_path), torch.float32, torch.device("cpu"), parallel)
    assert isinstance(model, Gemma4ForCausalLM)
    if name == DENSE:
        assert [*model.remote_modules()]
        return
    with pytest.raises(ConfigError, match="pipeline-parallel-size: 2 is not supported for a Gemma"):
        [*model.remote_modules()]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size_per_layer_input": 24}, "hidden_size_per_layer_input 24 is no multiple"),
        ({"global_head_dim": 528}, "attention of layer 1: head_dim 528 is above 512"),
        ({"global_head_dim": 40}, "attention of layer 1: head_dim 40 is no multiple of 16"),
    ],
)
def test_native_code_refuses_other_sizes_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    save(tmp_path, SHARED, **changes)
    with caplog.at_level(logging.INFO):
        assert isinstance(make_engine(tmp_path, "native")._model, TorchLM)
    assert any(f"no native code: {reason}" in each for each in caplog.messages)


def model_of(config: Gemma4Config, dtype: torch.dtype) -> DecoderLM:
    """Norms keep scores of attention as small as in other families."""
    model = make_model(config, dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.mul_(0.25)
    return model


def native_of(config: Gemma4Config, dtype: torch.dtype, variant: str) -> NativeLM:
    library = NativeLibrary(load_library(variant), dtype, 2)
    return NativeLM(model_of(config, dtype), 16, library)


def config_of(name: str) -> Gemma4Config:
    """Heads of 64 and 512, and an odd number of tiles in the feed-forward network."""
    _, shape = GEMMA4[name]
    known = {key: value for key, value in shape.items() if key != "initializer_range"}
    return msgspec.convert(
        {
            **known,
            "architectures": ["Gemma4ForCausalLM"],
            "vocab_size": NATIVE_VOCAB_SIZE,
            "vocab_size_per_layer_input": NATIVE_VOCAB_SIZE,
            "hidden_size": 96,
            "intermediate_size": 208,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "global_head_dim": 512,
            "sliding_window": 50,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-5,
        },
        Gemma4Config,
    )


each_size = pytest.mark.parametrize("name", [DENSE, SHARED, EXPERTS])


@each_variant
@each_size
def test_float32_logits_of_native_code_match_torch(name: str, variant: str) -> None:
    config, prompts, dtype = config_of(name), native_prompts(1, 17, 130, 700), torch.float32
    expected = run(TorchLM(model_of(config, dtype)), config, dtype, prompts, 300)
    found = run(native_of(config, dtype, variant), config, dtype, prompts, 300)
    assert all(logits.std() > 0.15 for logits in expected)
    assert furthest(found, expected) < 1e-4


@each_variant
@pytest.mark.parametrize(
    "name", [pytest.param(DENSE, marks=slow), SHARED, pytest.param(EXPERTS, marks=slow)]
)
def test_bfloat16_logits_of_native_code_are_nearer_to_float32(name: str, variant: str) -> None:
    config, prompts, dtype = config_of(name), native_prompts(1, 17, 130, 400), torch.bfloat16
    exact = run(TorchLM(model_of(config, dtype).float()), config, torch.float32, prompts, 300)
    torchs = run(TorchLM(model_of(config, dtype)), config, dtype, prompts, 300)
    found = run(native_of(config, dtype, variant), config, dtype, prompts, 300)
    assert furthest(found, exact, Tensor.mean) < furthest(torchs, exact, Tensor.mean)


@pytest.mark.parametrize("codes", [None, torch.int8, torch.uint8], ids=str)
@each_variant
@each_size
def test_logits_are_the_same_bits_whatever_shares_a_step(
    name: str, variant: str, codes: torch.dtype | None
) -> None:
    config, prompts, dtype = config_of(name), native_prompts(300, 35, 1, 9), torch.bfloat16
    model = native_of(config, dtype, variant)
    expected = run(model, config, dtype, prompts, 1000, codes=codes)
    for chunk_size in (1, 7, 64):
        found = run(model, config, dtype, prompts, chunk_size, codes=codes)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_size
    (alone,) = run(model, config, dtype, prompts[:1], 13, codes=codes)
    assert torch.equal(alone, expected[0])


@pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)
@each_variant
def test_quantized_caches_match_torch(variant: str, codes: torch.dtype) -> None:
    config, prompts, dtype = config_of(SHARED), native_prompts(1, 17, 300), torch.float32
    expected = run(TorchLM(model_of(config, dtype)), config, dtype, prompts, 90, codes=codes)
    found = run(native_of(config, dtype, variant), config, dtype, prompts, 90, codes=codes)
    assert furthest(found, expected, Tensor.mean) < 2e-4
    assert furthest(found, expected) < 5e-3


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        (DENSE, {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        (DENSE, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        (DENSE, {"layer_types": ["chunked_attention"] * 4}, "layer_types chunked_attention"),
        (DENSE, {"layer_types": [FULL]}, "layer_types has 1 entries"),
        (DENSE, {"per_layer_config": {"1": {"head_dim": 8}}}, f"heads of 2 sizes .* {FULL}"),
        (DENSE, {"per_layer_config": {"1": {"head_dim": 0}}}, "head_dim"),
        (DENSE, {"per_layer_config": {"1": {"sliding_window": 8}}}, "unknown field `sliding_w"),
        (DENSE, {"head_dim": 15}, f"head_dim 15 of {SLIDING} is odd"),
        (DENSE, {"num_key_value_heads": 3}, "no multiple of"),
        (DENSE, {"rope_parameters": {SLIDING: {"rope_type": "longrope"}}}, "'longrope'"),
        (
            DENSE,
            {"rope_parameters": {FULL: {"rope_type": "proportional", "factor": -1.0}}},
            "rope type 'proportional'",
        ),
        (SHARED, {"num_kv_shared_layers": 3}, f"leaves no layer of the kind {FULL}"),
        (SHARED, {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 leaves no layer"),
        (EXPERTS, {"top_k_experts": None}, "enable_moe_block needs num_experts, top_k_experts"),
        (EXPERTS, {"top_k_experts": 9}, "num_chosen is 9, which must be 1 to 8"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], problem: str
) -> None:
    save(tmp_path, name)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)
