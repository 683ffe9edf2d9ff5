"""Models in GGUF files write the texts of the same weights in a model folder."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from benchmarks.harness.engines import make_engine
from cli.plan.footprint import footprint_of
from services.worker.config.frequencies import Llama3Rope
from services.worker.layers.weights import Dense, Quantized
from services.worker.models.registry import read_model_config
from services.worker.weights.load import load_model
from shared.errors import ConfigError
from shared.formats.gguf.file import QUANTIZED
from shared.formats.gguf.folder import folder_of
from shared.settings.worker import WorkerConfig
from tests.selection import only
from tests.services.worker.checkpoints import assert_greedy, random_prompts, save_model
from tests.services.worker.driver import Driver, Job
from tests.shared.formats.gguf.writer import Made

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 7}
LLAMA3: dict[str, Any] = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD_LENGTH: dict[str, Any] = {"original_max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {}),
    "llama, tied": (LlamaForCausalLM, {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": (MistralForCausalLM, {"head_dim": 32, "sliding_window": None}),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen2": (Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3 moe": (Qwen3MoeForCausalLM, {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "gemma 2": (Gemma2ForCausalLM, {**GEMMA, "tie_word_embeddings": True}),
    "gemma 3": (Gemma3ForCausalLM, {**GEMMA, "tie_word_embeddings": True}),
}


def assert_texts_of(values: Path, file: Path, kernels: str = "native") -> None:
    """Texts of the engine with ``file`` are those of transformers with ``values``."""
    oracle = AutoModelForCausalLM.from_pretrained(values, dtype=torch.float32).eval()
    engine = make_engine(file, kernels)
    prompts = random_prompts(6)
    texts = Driver(engine, [3, 7, 1, 5], seed=1).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", [slow("F32"), slow("BF16"), "Q8_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(tmp_path: Path, name: str, kind: str) -> None:
    family, changes = FAMILIES[name]
    save_model(tmp_path / "dense", family, **changes)
    made = Made(tmp_path / "dense", tmp_path / "model.gguf", kind)
    values = made.save_values(tmp_path / "values", tmp_path / "dense")
    assert_texts_of(values, made.write())


@pytest.mark.parametrize("kernels", ["native", slow("torch"), slow("device")])
@pytest.mark.parametrize(
    "kind", ["F16", *(slow(each) if each in ("Q5_0", "Q5_1") else each for each in QUANTIZED)]
)
def test_every_type(tmp_path: Path, kind: str, kernels: str) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM, **WIDE)
    made = Made(tmp_path / "dense", tmp_path / "model.gguf", kind)
    values = made.save_values(tmp_path / "values", tmp_path / "dense")
    assert_texts_of(values, made.write(), kernels)


@pytest.mark.parametrize("kernels", ["native", "device", slow("torch")])
def test_layers_of_several_types(tmp_path: Path, kernels: str) -> None:
    """As in files of Q4_K_M: some tensors have more bits, and joined layers differ in type."""
    save_model(tmp_path / "dense", LlamaForCausalLM, **WIDE, tie_word_embeddings=True)
    others = {"attn_v.weight": "Q6_K", "1.ffn_down.weight": "Q6_K", "token_embd.weight": "Q6_K"}
    made = Made(tmp_path / "dense", tmp_path / "model.gguf", "Q4_K", others)
    values = made.save_values(tmp_path / "values", tmp_path / "dense")
    assert_texts_of(values, made.write(), kernels)


@pytest.mark.parametrize("kind", only([("Q4_0",), ("Q5_K",), ("Q8_0",)], QUANTIZED))
def test_a_model_in_bfloat16_keeps_codes(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM, **WIDE, tie_word_embeddings=True)
    made = Made(tmp_path / "dense", tmp_path / "model.gguf", kind)
    folder = folder_of(made.write())
    cpu = torch.device("cpu")
    model = load_model(folder, read_model_config(folder), torch.bfloat16, cpu, lambda *_: None)
    weights = [each for each in model.modules() if isinstance(each, Dense | Quantized)]
    assert {type(each) for each in weights} == {Quantized}
    layers: Any = model.model.layers
    found = layers[1].mlp.down_proj.weight.values.float()
    torch.testing.assert_close(
        found, made.values["model.layers.1.mlp.down_proj.weight"], rtol=2**-8, atol=1e-6
    )
    engine = make_engine(made.path, "native", dtype="bfloat16")
    texts = Driver(engine, [1000]).run([Job(prompt) for prompt in random_prompts(3)])
    assert all(texts)


MIXED = {"attn_v.weight": "Q6_K", "0.ffn_up.weight": "Q5_K", "1.ffn_up.weight": "Q4_0"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("kind", "others"),
    [
        *(("BF16", {}), ("Q4_0", {}), ("Q4_K", MIXED), ("Q8_0", MIXED)),
        *(pytest.param(kind, {}, marks=pytest.mark.slow) for kind in ("Q4_K", "Q6_K")),
    ],
)
def test_plans_know_the_memory(
    tmp_path: Path, kind: str, others: dict[str, str], dtype: Literal["bfloat16", "float32"]
) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM, **WIDE, tie_word_embeddings=True)
    file = Made(tmp_path / "dense", tmp_path / "model.gguf", kind, others).write()
    cpu, folder = torch.device("cpu"), folder_of(file)
    settings = WorkerConfig(model=str(file), device="cpu", dtype=dtype)
    planned = footprint_of(settings, cpu).requirements.weights
    config = read_model_config(folder)
    model = load_model(folder, config, getattr(torch, dtype), cpu, lambda *_: None)
    # The table of rotary positions is not in plans for stored codes.
    tensors = {*model.parameters(), *model.buffers()} - {*model.model.rotary.buffers()}
    held = sum(each.nbytes for each in tensors)
    assert planned == pytest.approx(held, rel=0.03 if kind == "BF16" else 0.002)


def test_rotary_factors_of_llama_3(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 1e4, **LLAMA3, **OLD_LENGTH}
    save_model(tmp_path / "dense", LlamaForCausalLM, rope_parameters=rope)
    made = Made(tmp_path / "dense", tmp_path / "model.gguf")
    slow = Llama3Rope(rope_theta=1e4, **LLAMA3, **OLD_LENGTH).frequencies(16, 128)
    fast = 1.0 / 1e4 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16)
    made.writer.add_tensor("rope_freqs.weight", (fast / slow).numpy())
    values = made.save_values(tmp_path / "values", tmp_path / "dense")
    assert_texts_of(values, made.write())


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rope_scaling(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    old = OLD_LENGTH if kind == "yarn" else {}
    save_model(tmp_path / "dense", LlamaForCausalLM, rope_parameters={**rope, **old})
    made = Made(tmp_path / "dense", tmp_path / "model.gguf")
    made.writer.add_string("llama.rope.scaling.type", kind)
    made.writer.add_float32("llama.rope.scaling.factor", 4.0)
    made.writer.add_uint32("llama.rope.scaling.original_context_length", 32)
    values = made.save_values(tmp_path / "values", tmp_path / "dense")
    assert_texts_of(values, made.write())


def test_a_file_in_parts(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM)
    made = Made(
        tmp_path / "dense",
        tmp_path / "model.gguf",
        "Q8_0",
        writer={"split_max_tensors": 7},
    )
    made.write()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    values = made.save_values(tmp_path / "values", tmp_path / "dense")
    assert_texts_of(values, parts[1])
    parts[2].unlink()
    with pytest.raises(ConfigError, match="00003-of"):
        folder_of(parts[1])


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM)
    folder = folder_of(Made(tmp_path / "dense", tmp_path / "model.gguf").write())
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes()[:-40_000])
    with pytest.raises(ConfigError, match=r"model\.gguf: tensor .* is not complete"):
        make_engine(folder)


def test_a_quantized_file_takes_no_setting(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM)
    file = Made(tmp_path / "dense", tmp_path / "model.gguf", "Q8_0").write()
    with pytest.raises(ConfigError, match="quantised already"):
        make_engine(file, quantization="wint8")


def test_dense_files_are_quantized_as_others(tmp_path: Path) -> None:
    save_model(tmp_path / "dense", LlamaForCausalLM)
    made = Made(tmp_path / "dense", tmp_path / "model.gguf", "BF16")
    values = made.save_values(tmp_path / "values", tmp_path / "dense")
    prompts = random_prompts(4)
    texts = [
        Driver(make_engine(model, "native", quantization="wint8"), [1000]).run(
            [Job(prompt) for prompt in prompts]
        )
        for model in (made.write(), values)
    ]
    assert texts[0] == texts[1]
