"""Native code compared with torch's operators, for every variant this CPU can run."""

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import PackedMatrix
from kernels.cpu.packing import NativeLibrary
from kernels.kv_layout import KVLayout
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import TorchLM
from services.worker.config.model_config import ModelConfig
from services.worker.layers.context import forward_context
from services.worker.layers.experts import Experts
from services.worker.layers.ops import NotSupported
from services.worker.layers.weights import Dense
from services.worker.machine.kv_cache import KVCache
from services.worker.machine.state_pool import StatePool
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import find_model
from services.worker.slots.table import SlotTable
from services.worker.step.batch import prepare_batch
from services.worker.weights.dummy import make_dummy
from services.worker.weights.load import build_model, quantize
from shared.wire.messages import Admit, Capacity, Decode, Prefill, SamplingParams, StepPlan
from tests.services.worker.builds import each_variant

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU = torch.device("cpu")
NUM_BLOCKS, MAX_LEN, VOCAB_SIZE = 192, 1024, 330
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3, three queries a key, tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_size": 48,
        "tie_word_embeddings": True,
    },
    "Qwen2, biases": {"architectures": ["Qwen2ForCausalLM"], "head_size": 16},
    "ERNIE, interleaved, biases everywhere": {
        "architectures": ["Ernie4_5ForCausalLM"],
        "head_size": 64,
        "use_bias": True,
    },
    "Llama, a head of 256, a key for each query": {
        "architectures": ["LlamaForCausalLM"],
        "head_size": 256,
        "num_attention_heads": 2,
    },
    "Llama, sixteen queries a key": {
        "architectures": ["LlamaForCausalLM"],
        "head_size": 32,
        "num_attention_heads": 16,
        "num_kv_heads": 1,
    },
    "Mistral, windows": {
        "architectures": ["MistralForCausalLM"],
        "head_size": 32,
        "sliding_window": 50,
    },
    "Gemma 2, windows, caps, tied": {
        "architectures": ["Gemma2ForCausalLM"],
        "head_size": 48,
        "sliding_window": 50,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 0.8,
        "tie_word_embeddings": True,
    },
    "Gemma 3, two rotations, a head of 256": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_size": 256,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "sliding_window": 300,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "OLMo 2, heads normed together": {"architectures": ["Olmo2ForCausalLM"], "head_size": 16},
    "Granite, factors, biases": {
        "architectures": ["GraniteForCausalLM"],
        "head_size": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "attention_multiplier": 0.2,
        "embedding_multiplier": 2.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.7,
    },
    "Qwen3-MoE, many experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_size": 32,
        "num_experts": 37,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 80,
        "norm_topk_prob": True,
    },
    "Qwen2-MoE, a gate, a dense layer": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "head_size": 16,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 112,
        "mlp_only_layers": [0],
    },
    "GLM-4.5, heads rotated in part, groups": {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_size": 48,
        "num_hidden_layers": 3,
        "n_routed_experts": 24,
        "num_experts_per_tok": 5,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "ERNIE with experts, all of them chosen": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "head_size": 16,
        "moe_num_experts": 4,
        "moe_k": 4,
        "moe_intermediate_size": 16,
    },
    "gpt-oss, experts with biases, sinks, windows": {
        "architectures": ["GptOssForCausalLM"],
        "head_size": 64,
        "num_local_experts": 7,
        "num_experts_per_tok": 3,
        "sliding_window": 50,
        "swiglu_limit": 1.0,
    },
}
EXPERTS = "Qwen3-MoE, many experts"
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "kv_lora_rank": 64,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
SHAPES["DeepSeek-V3, latents, yarn"] = {
    **LATENT,
    "num_attention_heads": 6,
    "rope_scaling": {**YARN, "original_max_position_embeddings": 64},
}
SHAPES["DeepSeek-V2, more heads than are computed at a time"] = {
    **LATENT,
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_attention_heads": 70,
    "num_kv_heads": 70,
    "q_lora_rank": None,
    "attention_bias": True,
}

# Each kind of layer once.
IN_BFLOAT16 = (
    "Qwen3, three queries a key, tied",
    "ERNIE, interleaved, biases everywhere",
    "Gemma 2, windows, caps, tied",
    "Qwen2-MoE, a gate, a dense layer",
    "gpt-oss, experts with biases, sinks, windows",
    "DeepSeek-V3, latents, yarn",
)


def make_config(name: str) -> ModelConfig:
    """An odd number of tiles in the feed-forward network, and a partial last tile in the head."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 208,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_kv_heads": 2,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    values |= SHAPES[name]
    return find_model(values["architectures"]).Config(**values)


def make_model(config: ModelConfig, dtype: torch.dtype) -> DecoderLM:
    """Weights with visible effects: attention is sharp, norms and biases are not trivial."""
    model = make_dummy(config, dtype, CPU)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or parameter.ndim == 1:
            mean = 0.0 if name.endswith("bias") else 1.0
            parameter.normal_(mean, 0.2, generator=generator)
        elif name not in ("lm_head.weight.values", "model.embed_tokens.weight.values"):
            parameter.mul_(6)
    model.lm_head.weight.values.copy_(model.model.embed_tokens.weight.values)
    return model


def make_native(
    config: ModelConfig, dtype: torch.dtype, variant: str, block_size: int, num_threads: int
) -> NativeLM:
    library = NativeLibrary(load_library(variant), dtype, num_threads)
    return NativeLM(make_model(config, dtype), block_size, library)


@torch.inference_mode()
def run(
    model: CausalLM,
    config: ModelConfig,
    dtype: torch.dtype,
    prompts: list[np.ndarray],
    chunk_size: int,
    block_size: int = 16,
    first_key: int | None = None,
    layouts: list[KVLayout] | None = None,
    codes: torch.dtype | None = None,
) -> list[Tensor]:
    """Logits [len(prompt), V] after every token of each prompt, ``chunk_size`` tokens per step;
    first chunks grow by one token from prompt to prompt. Tokens of a later chunk see no key before
    ``first_key``. The cache is quantized to ``codes``, if given."""
    num_blocks = NUM_BLOCKS * 16 // block_size
    capacity = Capacity(num_blocks, block_size, len(prompts), MAX_LEN, MAX_LEN)
    table, no_states = SlotTable(capacity), StatePool([], capacity, CPU)
    if layouts is None:
        whole = build_model(config, dtype, torch.device("meta"))
        layouts = whole.kv_layouts(dtype, drafts=False, codes=codes)
    cache = KVCache(layouts, num_blocks, block_size, CPU)
    if not model.clears_blocks:
        for layer in cache.layers:
            numbers = layer.entries if layer.scales is None else layer.scales
            numbers.fill_(float("nan"))
    free = np.random.default_rng(0).permutation(num_blocks).tolist()
    admits = []
    for slot, prompt in enumerate(prompts):
        blocks = [free.pop() for _ in range(-(-len(prompt) // block_size))]
        params = SamplingParams(seed=0)
        admits.append(Admit(slot, "r", 0, 0, 0, len(prompt), len(prompt), 0, params, blocks))
    ids = np.concatenate(prompts)
    found: list[list[Tensor]] = [[] for _ in prompts]
    num_done, step = [0] * len(prompts), 0
    while any(num < len(prompt) for num, prompt in zip(num_done, prompts, strict=True)):
        sizes = [
            min(chunk_size + (0 if step else slot), len(prompt) - num_done[slot])
            for slot, prompt in enumerate(prompts)
        ]
        decode = [Decode(slot) for slot, size in enumerate(sizes) if size == 1]
        prefill = [Prefill(slot, size) for slot, size in enumerate(sizes) if size > 1]
        plan = StepPlan(step, [], [] if step else admits, [], prefill, decode)
        table.apply(plan, ids)
        batch = prepare_batch(table, plan, cache, no_states)
        context = batch.context
        if first_key is not None:
            inputs = context.groups[0]
            attention: Any = inputs.attention
            nums_before = attention.num_keys - batch.rows.num_tokens
            first_keys = np.minimum(first_key, nums_before)
            attention = replace(attention, first_keys=first_keys)
            context = replace(context, groups=[inputs._replace(attention=attention)])
        with forward_context(context):
            hidden = model(batch.input_ids, batch.positions)
        parts = model.logits(hidden).split(batch.rows.num_tokens.tolist())
        for slot, part in zip(batch.rows.slots.tolist(), parts, strict=True):
            found[slot].append(part)
        table.num_computed[batch.rows.slots] += batch.rows.num_tokens
        num_done = [num + size for num, size in zip(num_done, sizes, strict=True)]
        step += 1
    return [torch.cat(parts) for parts in found]


def random_prompts(*lengths: int) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB_SIZE, length).astype(np.int32) for length in lengths]


def furthest(found: list[Tensor], expected: list[Tensor], measure: Callable = Tensor.max) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float(measure((one - other).abs())) for one, other in pairs)


@each_variant
@pytest.mark.parametrize(
    ("name", "first_key"),
    [
        *(("Qwen2, biases", first_key) for first_key in (1, 40, 290)),
        *(("Mistral, windows", first_key) for first_key in (40, 290)),
        *(("DeepSeek-V3, latents, yarn", first_key) for first_key in (40, 290)),
    ],
)
def test_keys_that_are_hidden_are_as_if_not_there(name: str, variant: str, first_key: int) -> None:
    """One, a part of a tile, and more than a group of keys."""
    config, prompts = make_config(name), random_prompts(400, 330, 9)
    float32, native = torch.float32, make_native(config, torch.float32, variant, 16, 2)
    expected = run(
        TorchLM(make_model(config, float32)), config, float32, prompts, 64, 16, first_key
    )
    found = run(native, config, float32, prompts, 64, 16, first_key)
    assert furthest(found, expected) < 1e-3
    seen = run(native, config, float32, prompts, 64, 16)
    assert furthest(found, seen) > 0.01


@each_variant
@pytest.mark.parametrize("name", SHAPES)
def test_float32_logits_match_torch(name: str, variant: str) -> None:
    """Chunks of 300 begin and end within splits of the keys; a row has three of those."""
    config, prompts = make_config(name), random_prompts(1, 17, 130, 700)
    expected = run(TorchLM(make_model(config, torch.float32)), config, torch.float32, prompts, 300)
    native = make_native(config, torch.float32, variant, 16, 2)
    found = run(native, config, torch.float32, prompts, 300)
    assert all(logits.std() > 0.15 for logits in expected)
    assert furthest(found, expected) < 1e-4


@each_variant
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_BFLOAT16 else pytest.mark.slow) for name in SHAPES],
)
def test_bfloat16_logits_are_nearer_to_float32_than_torchs(name: str, variant: str) -> None:
    """On average: native code rounds less."""
    config, prompts, dtype = make_config(name), random_prompts(1, 17, 130, 400), torch.bfloat16
    rounded = make_model(config, dtype).float()
    exact = run(TorchLM(rounded), config, torch.float32, prompts, 300)
    torchs = run(TorchLM(make_model(config, dtype)), config, dtype, prompts, 300)
    found = run(make_native(config, dtype, variant, 16, 2), config, dtype, prompts, 300)
    assert furthest(found, exact, Tensor.mean) < furthest(torchs, exact, Tensor.mean)


@each_variant
def test_logits_that_are_no_numbers_are_not_bent_to_some(variant: str) -> None:
    config = make_config("Gemma 2, windows, caps, tied")
    hidden = torch.randn(2, config.hidden_size)
    hidden[1, 3] = torch.nan
    logits = make_native(config, torch.float32, variant, 16, 1).logits(hidden)
    assert logits[0].abs().max() <= 0.8
    assert logits[1].isnan().all()


@each_variant
def test_gates_far_from_zero_are_shut_or_open(variant: str) -> None:
    config, prompts = make_config("Qwen2, biases"), random_prompts(40)

    def with_wide_gates() -> DecoderLM:
        model = make_model(config, torch.float32)
        layer: Any
        for layer in model.model.layers:
            layer.mlp.gate_up_proj.weight.values[: config.intermediate_size] *= 1000
        return model

    library = NativeLibrary(load_library(variant), torch.float32, 1)
    native = NativeLM(with_wide_gates(), 16, library)
    expected = run(TorchLM(with_wide_gates()), config, torch.float32, prompts, 300)
    found = run(native, config, torch.float32, prompts, 300)
    assert furthest(found, expected) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_variant
@pytest.mark.parametrize(
    "name",
    [
        "Qwen3, three queries a key, tied",
        "Gemma 2, windows, caps, tied",
        "gpt-oss, experts with biases, sinks, windows",
        EXPERTS,
        "GLM-4.5, heads rotated in part, groups",
        "DeepSeek-V3, latents, yarn",
    ],
)
def test_a_tokens_logits_are_the_same_bits_whatever_shares_its_step(
    name: str, variant: str, dtype: torch.dtype
) -> None:
    config, prompts = make_config(name), random_prompts(300, 35, 1, 9)
    model = make_native(config, dtype, variant, 16, 2)
    expected = run(model, config, dtype, prompts, 1000)
    for chunk_size in (1, 16, 270):
        found = run(model, config, dtype, prompts, chunk_size)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_size
    (alone,) = run(model, config, dtype, prompts[:1], 13)
    assert torch.equal(alone, expected[0])


@each_variant
def test_of_experts_with_equal_scores_the_first_is_chosen(variant: str) -> None:
    """In the first layer each pair of experts has equal logits, in the second all do."""

    def with_ties() -> DecoderLM:
        model = make_model(make_config(EXPERTS), torch.float32)
        for layer, rows in zip(experts_of(model), (2, 1000), strict=True):
            weight = layer.gate.weight
            for start in range(0, len(weight), rows):
                weight[start : start + rows] = weight[start].clone()
        return model

    config, prompts = make_config(EXPERTS), random_prompts(1, 40, 130)
    expected = run(TorchLM(with_ties()), config, torch.float32, prompts, 64)
    library = NativeLibrary(load_library(variant), torch.float32, 2)
    found = run(NativeLM(with_ties(), 16, library), config, torch.float32, prompts, 64)
    assert furthest(found, expected) < 1e-4


def experts_of(model: DecoderLM) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("gate_up_proj", "experts.2.gate_up_proj: weights in another form than other experts'"),
        ("down_proj", "experts.2.down_proj: weights in another form than other experts'"),
    ],
)
def test_experts_in_several_forms_are_refused(part: str, message: str) -> None:
    model = make_model(make_config(EXPERTS), torch.float32)
    linear = getattr(experts_of(model)[1].products[2], part)
    quantize(linear, "wint8")
    library = NativeLibrary(load_library(variants()[0]), torch.float32, 1)
    with pytest.raises(NotSupported, match=re.escape(message)):
        NativeLM(model, 16, library)
    TorchLM(model)


@pytest.mark.parametrize("name", ["Qwen2, biases", "DeepSeek-V3, latents, yarn"])
@pytest.mark.parametrize("block_size", [32, 128])
def test_larger_blocks_change_nothing(block_size: int, name: str) -> None:
    config, prompts = make_config(name), random_prompts(300, 50)
    dtype, variant = torch.float32, variants()[0]
    expected, found = (
        run(make_native(config, dtype, variant, size, 1), config, dtype, prompts, 90, size)
        for size in (16, block_size)
    )
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("change", "block_size", "message"),
    [
        ({"head_size": 24}, 16, "head_dim 24 is no multiple of 16"),
        ({"head_size": 528}, 16, "head_dim 528 is above 512"),
        ({"intermediate_size": 100}, 16, "0.mlp.gate_up_proj: 100 gates are no multiple of 16"),
        ({"hidden_size": 100}, 16, "qkv_proj: 100 inputs are no multiple of 16"),
        ({}, 8, "block_size 8 is no multiple of 16"),
        (
            {"num_attention_heads": 64, "num_kv_heads": 1},
            16,
            "64 query heads share a KV head",
        ),
        ({"kv_lora_rank": 24}, 16, "layer 0: kv_lora_rank 24 is no multiple of 16"),
        ({"kv_lora_rank": 528}, 16, "layer 0: kv_lora_rank 528 is above 512"),
        ({"qk_rope_head_dim": 80}, 16, "layer 0: qk_rope_head_dim 80 is above 64"),
        ({"v_head_dim": 20}, 16, "layer 0: v_head_dim 20 is no multiple of 16"),
    ],
)
def test_a_model_that_native_code_cannot_run_is_refused_with_the_reason(
    change: dict[str, int], block_size: int, message: str
) -> None:
    name = "DeepSeek-V3, latents, yarn" if set(change) & set(LATENT) else "Qwen2, biases"
    config = msgspec.structs.replace(make_config(name), **change)
    model = make_model(config, torch.float32)
    library = NativeLibrary(load_library(variants()[0]), torch.float32, 1)
    with pytest.raises(NotSupported, match=re.escape(message)):
        NativeLM(model, block_size, library)
    TorchLM(model)  # it is complete


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_variant
def test_heads_of_the_size_of_deepseek_v3(variant: str, dtype: torch.dtype) -> None:
    """128 of them, over latents of 512 and a key of 64."""
    make: Any = find_model(["DeepseekV3ForCausalLM"]).Config
    config = make(
        architectures=["DeepseekV3ForCausalLM"],
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=128,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-6,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        q_lora_rank=32,
        rope_scaling={**YARN, "original_max_position_embeddings": 4096},
    )
    exact, prompts = torch.float32, random_prompts(1, 270, 20)
    rounded = make_model(config, dtype).float()
    expected = run(TorchLM(rounded), config, exact, prompts, 100)
    found = run(make_native(config, dtype, variant, 16, 2), config, dtype, prompts, 100)
    assert all(logits.std() > 0.15 for logits in expected)
    if dtype == exact:
        assert furthest(found, expected) < 1e-4
        return
    torchs = run(TorchLM(make_model(config, dtype)), config, dtype, prompts, 100)
    assert furthest(found, expected, Tensor.mean) < furthest(torchs, expected, Tensor.mean)


def test_each_weight_is_freed_when_it_is_packed() -> None:
    """Except untied embeddings, which are read in place."""
    model = make_model(make_config("Qwen2, biases"), torch.float32)
    dense = [module for module in model.modules() if isinstance(module, Dense)]
    weights = [weakref.ref(each) for each in dense if each is not model.model.embed_tokens.weight]
    del dense
    nums_left: list[int] = []

    class Watching(NativeLibrary):
        def pack(self, *args: Any, **options: Any) -> PackedMatrix:
            nums_left.append(sum(each() is not None for each in weights))
            return super().pack(*args, **options)

    NativeLM(model, 16, Watching(load_library(variants()[0]), torch.float32, 1))
    assert nums_left == list(range(len(weights), 0, -1))
