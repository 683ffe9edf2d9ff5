"""Every family against transformers: logits, and greedy text, whole and in chunks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    Ernie4_5_MoeForCausalLM,
    Ernie4_5ForCausalLM,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Glm4MoeForCausalLM,
    GlmMoeDsaForCausalLM,
    GptOssForCausalLM,
    GraniteForCausalLM,
    Lfm2ForCausalLM,
    Lfm2MoeForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    Olmo2ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from benchmarks.harness.engines import KERNELS, make_engine
from benchmarks.harness.oracle import true_logits
from kernels.cpu.operators import LANES
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import TorchLM
from services.worker.config.sparse_config import SparseConfig
from services.worker.models.registry import MODELS, read_model_config
from shared.errors import ConfigError
from shared.model_folder import weight_files
from tests.selection import only
from tests.services.worker.checkpoints import (
    asked_once,
    assert_greedy,
    change_config,
    oracle_of,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job
from tests.services.worker.forward import our_logits
from tests.services.worker.gemma4 import GEMMA4
from tests.services.worker.hybrids import HYBRIDS

LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OLD_LENGTH = {"original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **OLD_LENGTH}
MULTIPLIERS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.5,
}
ELSEWHERE = (
    "BailingMoeV2ForCausalLM",
    "Ernie4_5_ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Glm46VForConditionalGeneration",
    "Glm4vForConditionalGeneration",
    "Glm4vMoeForConditionalGeneration",
    "GlmOcrForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "Kimi_K25ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "Lfm2VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration",
    "MiMoForCausalLM",
    "MiniCPMV4_6ForConditionalGeneration",
    "Ernie4_5_VLMoeForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "PaddleOCRVLForConditionalGeneration",
    "QianfanOCRForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
WINDOW = 7  # shorter than most prompts here
SIZED: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM: dict[str, Any] = {
    **SIZED,
    "head_dim": 16,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
    "num_mtp_layers": 0,
}
ERNIE: dict[str, Any] = {
    "head_dim": 16,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_intermediate_size": 32,
}
OSS: dict[str, Any] = {
    "head_dim": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    **SIZED,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
GROUPS = {"n_group": 4, "topk_group": 2}
DENSE = {**LATENT, "first_k_dense_replace": 3, "n_group": 1, "topk_group": 1}
# Scores of sixteen heads are seldom equal by chance.
INDEXED = {**LATENT, "index_topk": 9, "index_n_heads": 16, "index_head_dim": 32}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 9,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
LFM: dict[str, Any] = {
    "layer_types": ["conv", "conv", "full_attention"],
    "block_multiple_of": 32,
}
CASES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "deepseek v2, groups": (
        DeepseekV2ForCausalLM,
        {
            **LATENT,
            **GROUPS,
            "topk_method": "group_limited_greedy",
            "n_shared_experts": 2,
            "routed_scaling_factor": 4.0,
        },
    ),
    "deepseek v2, queries at once, a small key": (
        DeepseekV2ForCausalLM,
        {**LATENT, "q_lora_rank": None, "qk_rope_head_dim": 8, "n_shared_experts": 1},
    ),
    "deepseek v3, yarn": (
        DeepseekV3ForCausalLM,
        {
            **LATENT,
            **GROUPS,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "deepseek v3, dense, queries at once, biases, halves, parts of a temperature": (
        DeepseekV3ForCausalLM,
        {
            **DENSE,
            "q_lora_rank": None,
            "attention_bias": True,
            "rope_interleave": False,
            "rope_parameters": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7},
        },
    ),
    "deepseek v3.2, yarn": (
        DeepseekV32ForCausalLM,
        {
            **INDEXED,
            **GROUPS,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm 5, shared choices, biases": (
        GlmMoeDsaForCausalLM,
        {
            **INDEXED,
            "num_hidden_layers": 4,
            "attention_bias": True,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "llama": (LlamaForCausalLM, {}),
    "llama, no groups, biases": (
        LlamaForCausalLM,
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama, one KV head": (LlamaForCausalLM, {"num_key_value_heads": 1}),
    "llama 3.2": (
        LlamaForCausalLM,
        {
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3, **OLD_LENGTH},
        },
    ),
    "llama, linear": (
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama, dynamic": (
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "llama, yarn": (LlamaForCausalLM, {"rope_parameters": YARN}),
    "qwen2, yarn": (Qwen2ForCausalLM, {"rope_parameters": YARN}),
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3, tied, biases": (
        Qwen3ForCausalLM,
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "ernie": (Ernie4_5ForCausalLM, {"head_dim": 16, "tie_word_embeddings": True}),
    "ernie, biases": (Ernie4_5ForCausalLM, {"head_dim": 8, "use_bias": True}),
    "granite": (GraniteForCausalLM, MULTIPLIERS),
    "granite, tied, biases": (
        GraniteForCausalLM,
        {
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            **MULTIPLIERS,
        },
    ),
    "olmo 2": (Olmo2ForCausalLM, {}),
    "olmo 2, no groups, biases": (
        Olmo2ForCausalLM,
        {"num_key_value_heads": 4, "attention_bias": True},
    ),
    "mistral": (MistralForCausalLM, {"sliding_window": None}),
    "mistral, windows": (MistralForCausalLM, {"sliding_window": WINDOW}),
    "qwen2, windows": (
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3, windows by layer": (
        Qwen3ForCausalLM,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3 moe": (
        Qwen3MoeForCausalLM,
        {**SIZED, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True},
    ),
    "qwen3 moe, some layers dense, windows": (
        Qwen3MoeForCausalLM,
        {
            **SIZED,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2 moe": (
        Qwen2MoeForCausalLM,
        {**SIZED, "num_experts": 8, "shared_expert_intermediate_size": 48},
    ),
    "qwen2 moe, some layers dense, windows": (
        Qwen2MoeForCausalLM,
        {
            **SIZED,
            "num_experts": 6,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "mixtral": (MixtralForCausalLM, {"num_local_experts": 8}),
    "mixtral, windows": (MixtralForCausalLM, {"num_local_experts": 5, "sliding_window": WINDOW}),
    "gemma 2": (
        Gemma2ForCausalLM,
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    ),
    "gemma 2, no caps, biases, untied": (
        Gemma2ForCausalLM,
        {
            **GEMMA,
            "head_dim": 32,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "gemma 3, a pace for each kind of layer": (
        Gemma3ForCausalLM,
        {
            **GEMMA,
            "sliding_window_pattern": 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma 3, capped logits": (
        Gemma3ForCausalLM,
        {**GEMMA, "num_hidden_layers": 6, "final_logit_softcapping": 4.0},
    ),
    "ernie moe": (Ernie4_5_MoeForCausalLM, ERNIE),
    "ernie moe, one layer in two, none shared": (
        Ernie4_5_MoeForCausalLM,
        {
            **ERNIE,
            "num_hidden_layers": 4,
            "moe_num_shared_experts": 0,
            "moe_layer_interval": 2,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        {**OSS, "rope_parameters": {**YARN, "truncate": False}},
    ),
    "gpt-oss, no biases, a low limit, windows by layer, tied": (
        GptOssForCausalLM,
        {
            **OSS,
            "attention_bias": False,
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.5,
            "num_experts_per_tok": 3,
            "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "glm moe": (Glm4MoeForCausalLM, {**GLM, "use_qk_norm": True, "attention_bias": True}),
    "glm moe, groups, a factor, two shared": (
        Glm4MoeForCausalLM,
        {
            **GLM,
            "head_dim": 32,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
    ),
    "lfm2": (Lfm2ForCausalLM, LFM),
    "lfm2, a wide convolution with biases": (
        Lfm2ForCausalLM,
        {
            **LFM,
            "conv_L_cache": 5,
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "num_key_value_heads": 1,
        },
    ),
    "lfm2 moe": (
        Lfm2MoeForCausalLM,
        {
            **LFM,
            **SIZED,
            "num_experts": 8,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "glm moe, weights as they are": (
        Glm4MoeForCausalLM,
        {**GLM, "norm_topk_prob": False, "partial_rotary_factor": 0.25},
    ),
}


ALL_CASES = CASES | HYBRIDS | GEMMA4
# The first case of each family.
FIRST = [*{family: name for name, (family, _) in reversed(ALL_CASES.items())}.values()]
# Each kind of layer once.
IN_BFLOAT16 = [
    ("deepseek v3, yarn", "native"),
    ("glm 5, shared choices, biases", "torch"),
    ("llama 3.2", "native"),
    ("qwen3 moe", "native"),
    ("gemma 2", "native"),
    ("gpt-oss", "native"),
    ("lfm2", "torch"),
    ("qwen3-next", "native"),
    ("kimi", "native"),
    ("gemma 4", "native"),
]


@pytest.fixture(scope="module", params=ALL_CASES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = ALL_CASES[request.param]
    folder = tmp_path_factory.mktemp("family")
    save_model(folder, family, shard_size="40KB", **changes)
    assert len(weight_files(folder)) >= 2
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PreTrainedModel:
    return asked_once(oracle_of(folder))


def test_nearly_every_family_is_compared_here() -> None:
    """MiMo is unknown to transformers; test_models.py compares it with Qwen2, and test_ling.py has
    Ling 2.0. Texts of models that read images too are compared in test_kimi_k25.py,
    test_texts_of_hybrids.py, test_texts_without_images.py and ``media``."""
    compared, others = [*CASES.values(), *HYBRIDS.values(), *GEMMA4.values()], {*ELSEWHERE}
    assert {family.__name__ for family, _ in compared} >= set(MODELS) - others


def assert_same_logits(folder: Path, oracle: PreTrainedModel, kernels: str = "torch") -> None:
    prompts = random_prompts(6)
    logits = our_logits(folder, prompts, torch.float32, kernels)
    for prompt, ours in zip(prompts, logits, strict=True):
        np.testing.assert_allclose(ours, true_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("folder", "kernels"),
    # test_hybrids.py has logits of hybrids in chunks.
    only([(name, "torch") for name in (*CASES, *GEMMA4)], ALL_CASES, KERNELS),
    indirect=["folder"],
)
def test_logits_match_transformers(folder: Path, oracle: PreTrainedModel, kernels: str) -> None:
    assert_same_logits(folder, oracle, kernels)


@pytest.mark.parametrize(
    ("folder", "kernels"), only(IN_BFLOAT16, ALL_CASES, KERNELS), indirect=["folder"]
)
def test_bfloat16_stays_near_the_logits_of_float32(
    folder: Path, oracle: PreTrainedModel, kernels: str
) -> None:
    """Three layers of eight-bit mantissas: within 4 % of the logits' spread on average, unless
    another expert is occasionally chosen, or the delta rule norms a short query or key."""
    prompts, config = random_prompts(6), read_model_config(folder)
    logits = our_logits(folder, prompts, torch.bfloat16, kernels)
    true = [true_logits(oracle, prompt) for prompt in prompts]
    gaps = [np.abs(a - b).mean() / b.std() for a, b in zip(logits, true, strict=True)]
    limit = 0.15 if isinstance(config, SparseConfig) else 0.04
    assert (np.median(gaps) if hasattr(config, "delta_spec") else max(gaps)) < limit


WHOLE, CHUNKS = [1000], [3, 7, 1, 5]


@pytest.mark.parametrize(
    ("folder", "kernels", "chunk_sizes"),
    only([(name, "native", CHUNKS) for name in FIRST], ALL_CASES, KERNELS, [WHOLE, CHUNKS]),
    indirect=["folder"],
)
def test_greedy_text_is_that_of_transformers(
    folder: Path, oracle: PreTrainedModel, kernels: str, chunk_sizes: list[int]
) -> None:
    prompts = [*random_prompts(4), random_prompts(3, seed=1)[2] * 3]
    engine = make_engine(folder, kernels)
    is_native = kernels == "native" and read_model_config(folder).head_dim % LANES == 0
    assert isinstance(engine._model, NativeLM if is_native else TorchLM)
    texts = Driver(engine, chunk_sizes).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_older_configs_have_rope_scaling(tmp_path: Path, key: str, kind: str) -> None:
    save_model(tmp_path, LlamaForCausalLM)
    scaling = {key: kind, **LLAMA3, **OLD_LENGTH}
    change_config(tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling=scaling)
    rope = read_model_config(tmp_path).rope
    assert type(rope).__name__.lower() == f"{kind}rope"
    assert rope.rope_theta == 500.0
    assert_same_logits(tmp_path, AutoModelForCausalLM.from_pretrained(tmp_path).eval())


@pytest.mark.parametrize(
    ("family", "changes", "left_out"),
    [
        (LlamaForCausalLM, {"num_key_value_heads": 4}, ["num_key_value_heads", "head_dim"]),
        (
            Ernie4_5ForCausalLM,
            {"head_dim": 8, "tie_word_embeddings": True},
            ["tie_word_embeddings"],
        ),
    ],
)
def test_defaults_of_a_config_come_from_its_family(
    tmp_path: Path, family: type[PreTrainedModel], changes: dict[str, Any], left_out: list[str]
) -> None:
    save_model(tmp_path, family, **changes)
    change_config(tmp_path, rope_parameters=None, **dict.fromkeys(left_out))
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"rope_theta", "rope_parameters", *left_out} & set(config)
    assert_same_logits(tmp_path, family.from_pretrained(tmp_path).eval())


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("qwen3 moe", {"num_experts_per_tok": 9}, "num_chosen is 9, which must be 1 to 8"),
        ("qwen3 moe", {"num_local_experts": None}, "num_experts is missing"),
        (
            "qwen2 moe",
            {"use_sliding_window": True, "sliding_window": 0},
            "sliding_window 0 is not supported where use_sliding_window is true",
        ),
        ("ernie moe", {"use_bias": True}, "use_bias true is not supported beside experts"),
        ("glm moe", {"n_group": 3}, "1 of 3 groups of 8 experts: groups must be equal"),
        (
            "glm moe",
            {"rope_parameters": {"partial_rotary_factor": 0.2}},
            "partial_rotary_factor 0.2 of head_dim 16: 3 numbers cannot be rotated in pairs",
        ),
    ],
)
def test_a_config_whose_experts_we_cannot_compute_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], problem: str
) -> None:
    family, shape = CASES[name]
    save_model(tmp_path, family, **shape)
    change_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=problem):
        read_model_config(tmp_path)
