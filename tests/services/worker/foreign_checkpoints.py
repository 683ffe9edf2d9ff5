"""Tiny random checkpoints of transformers' architectures; some are also Shoal's own."""

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel

from tests.services.worker.checkpoints import (
    EOS_ID,
    MAX_POSITIONS,
    VOCAB_SIZE,
    change_config,
    save_model,
)
from tests.services.worker.gemma4 import GEMMA4

SLIDES = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERTS = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
CONVOLVES = {"layer_types": ["conv", "full_attention"] * 2}
GRANITE = {
    "logits_scaling": 2.0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "AfmoeForCausalLM": {
        "head_dim": 16,
        "num_experts": 4,
        "num_dense_layers": 1,
        **EXPERTS,
        **SLIDES,
    },
    "Qwen3MoeForCausalLM": {"head_dim": 16, "num_experts": 4, **EXPERTS},
    "DeepseekV3ForCausalLM": {**SHARED_EXPERTS, **LATENT},
    "MiMoV2FlashForCausalLM": {
        "head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        **EXPERTS,
        **SLIDES,
    },
    "Glm4MoeForCausalLM": {"head_dim": 16, **SHARED_EXPERTS},
    "Ernie4_5_MoeForCausalLM": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    "GptOssForCausalLM": {"head_dim": 16, "num_local_experts": 4, **EXPERTS, **SLIDES},
    "Gemma2ForCausalLM": {
        "head_dim": 16,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 4.0,
        **SLIDES,
    },
    "Gemma3ForCausalLM": {"head_dim": 16, **SLIDES},
    "Phi3ForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "GraniteForCausalLM": GRANITE,
    "Cohere2ForCausalLM": {"logit_scale": 0.25, **SLIDES},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0, 1, 1]},
    "Starcoder2ForCausalLM": {"sliding_window": 5},
    "GPT2LMHeadModel": {},
}
TEXT_OF_GEMMA3 = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "eos_token_id": EOS_ID,
    **SLIDES,
}
OWN_FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {
        **SHARED_EXPERTS,
        **LATENT,
        "topk_method": "group_limited_greedy",
    },
    "DeepseekV3ForCausalLM": FAMILIES["DeepseekV3ForCausalLM"],
    "Ernie4_5ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": FAMILIES["Ernie4_5_MoeForCausalLM"],
    "Gemma2ForCausalLM": FAMILIES["Gemma2ForCausalLM"],
    "Gemma3ForCausalLM": FAMILIES["Gemma3ForCausalLM"],
    "Gemma4ForCausalLM": GEMMA4["gemma 4, experts"][1] | {"num_key_value_heads": 4},
    "Glm4MoeForCausalLM": FAMILIES["Glm4MoeForCausalLM"],
    "GptOssForCausalLM": FAMILIES["GptOssForCausalLM"],
    "GraniteForCausalLM": GRANITE,
    "Lfm2ForCausalLM": {**CONVOLVES, "block_multiple_of": 32},
    "Lfm2MoeForCausalLM": {**CONVOLVES, **EXPERTS, "num_experts": 4, "num_dense_layers": 1},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 5},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Olmo2ForCausalLM": {},
    "Qwen2ForCausalLM": {"use_sliding_window": True, **SLIDES},
    "Qwen2MoeForCausalLM": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        **EXPERTS,
    },
    "Qwen3ForCausalLM": {"head_dim": 16},
    "Qwen3MoeForCausalLM": FAMILIES["Qwen3MoeForCausalLM"],
}


def save_family(folder: Path, name: str, **changes: Any) -> None:
    """Four layers, so that each kind of layer occurs twice."""
    family: type[PreTrainedModel] = getattr(transformers, name)
    save_model(
        folder, family, **({"num_hidden_layers": 4} | (FAMILIES | OWN_FAMILIES)[name] | changes)
    )


def save_with_images(folder: Path) -> None:
    """Gemma 3 with its image encoder: the text model's keys are in ``text_config``."""
    image = {"image_size": 28, "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2}
    save_model(
        folder,
        transformers.Gemma3ForConditionalGeneration,
        text_config=TEXT_OF_GEMMA3,
        vision_config={"hidden_size": 32, "intermediate_size": 32, **image},
        mm_tokens_per_image=4,
        image_token_index=5,
    )
    change_config(folder, **dict.fromkeys(TEXT_OF_GEMMA3))
