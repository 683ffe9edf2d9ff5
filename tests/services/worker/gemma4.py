"""Tiny random checkpoints of Gemma 4."""

from typing import Any

from transformers import (
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedForConditionalGeneration,
    PreTrainedModel,
)

from tests.services.worker.checkpoints import EOS_ID, MAX_POSITIONS, VOCAB_SIZE

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 7
DENSE: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL] * 2,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.15,  # four layers magnify rounding less
    "final_logit_softcapping": 4.0,
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
SHARED: dict[str, Any] = {
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
OF_TEXT: dict[str, Any] = {
    **DENSE,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": None,
    "eos_token_id": EOS_ID,
    "pad_token_id": 0,  # in place of images
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "position_embedding_size": 16,
}
PATCHES = {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16, "output_proj_dims": 64}
GEMMA4: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    "gemma 4": (Gemma4ForCausalLM, {**DENSE, **KEYS_AS_VALUES}),
    "gemma 4, biases, untied, all of a head turns": (
        Gemma4ForCausalLM,
        {
            **DENSE,
            "num_hidden_layers": 6,
            "layer_types": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "final_logit_softcapping": None,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "rope_theta": 1e5, "factor": 4.0},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma 4, inputs of layers, shared keys and values": (Gemma4ForCausalLM, {**DENSE, **SHARED}),
    "gemma 4, experts": (Gemma4ForCausalLM, {**DENSE, **KEYS_AS_VALUES, **EXPERTS}),
    "gemma 4 with images": (
        Gemma4ForConditionalGeneration,
        {
            "text_config": {**OF_TEXT, **KEYS_AS_VALUES, **EXPERTS},
            "vision_config": TOWER,
            "tie_word_embeddings": True,
        },
    ),
    "gemma 4 unified": (
        Gemma4UnifiedForCausalLM,
        {
            **{key: DENSE[key] for key in DENSE if key != "hidden_size_per_layer_input"},
            **KEYS_AS_VALUES,
        },
    ),
    "gemma 4 unified with images": (
        Gemma4UnifiedForConditionalGeneration,
        {
            "text_config": {
                key: OF_TEXT[key] for key in OF_TEXT if key != "hidden_size_per_layer_input"
            },
            "vision_config": PATCHES,
            "audio_config": {"audio_embed_dim": 32},
            "tie_word_embeddings": True,
        },
    ),
}
