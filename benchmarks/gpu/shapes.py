"""Models with the shapes of real config.json files and random weights."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

Config = dict[str, Any]


class Mixture(NamedTuple):
    """The experts of a layer."""

    num_experts: int
    num_chosen: int
    hidden_size: int
    inner_size: int


MIXTURES = {
    "Qwen3-30B-A3B": Mixture(128, 8, 2048, 768),
    "ERNIE-4.5-21B-A3B": Mixture(64, 6, 2560, 1536),
}
TINY_MIXTURES = {"tiny": Mixture(8, 2, 64, 32)}

QWEN3_8B: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
}
# Qwen3-30B-A3B
QWEN3_MOE: Config = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
# DeepSeek-V2-Lite, with the router of V3.
LATENTS: Config = QWEN3_8B | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
}
LLAMA_1B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 128001,
}
TINY: Config = QWEN3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 511,
}


def with_mtp(config: Config) -> Config:
    """``config`` in MiMo's layout: biases instead of head norms, and an MTP layer."""
    of_mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    return config | of_mimo | {"num_nextn_predict_layers": 1}


def write_model(folder: Path, config: Config) -> Path:
    """All files of a model but the weights. Each id is a word."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    vocabulary = {f"w{token_id}": token_id for token_id in range(config["vocab_size"])}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def weights_bytes(config: Config, itemsize: int) -> int:
    """Bytes of weights read by a step: all but an untied embedding and the MTP layers."""
    head = (config["vocab_size"] + 1) * config["hidden_size"]
    return (config["num_hidden_layers"] * _layer_size(config) + head) * itemsize


def token_bytes(config: Config, itemsize: int) -> int:
    """Bytes of a token's keys and values in all layers."""
    places = 2 * config["num_key_value_heads"] * config["head_dim"]
    return int(config["num_hidden_layers"] * places * itemsize)


def prompt_flops(config: Config, num_tokens: int) -> int:
    """FLOPs of a prompt computed at once: GEMMs with the weights, causal attention, and the logits
    of its last token."""
    attention = 2 * config["num_attention_heads"] * config["head_dim"] * (num_tokens + 1)
    layer = num_tokens * (2 * _layer_size(config) + attention)
    head = 2 * config["vocab_size"] * config["hidden_size"]
    return int(config["num_hidden_layers"] * layer + head)


def _layer_size(config: Config) -> int:
    """Parameters of a layer."""
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    heads = (2 * num_heads + 2 * config["num_key_value_heads"]) * config["head_dim"]
    return int((heads + 3 * config["intermediate_size"] + 2) * hidden)
