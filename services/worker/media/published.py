"""Configs that transformers does not know as they are published."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, Ernie4_5_VLMoeConfig

from shared.model_folder import CONFIG_FILE, decode_json, find_file

ERNIE = "ernie4_5_moe_vl"
OF_TEXTS = ("hidden_size", "vocab_size", "rms_norm_eps", "pad_token_id")
HEAD_DIM = 128  # fits the section of rotations by default; a tower needs none
OF_IMAGES = ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size")


def read_config(folder: Path) -> Any:
    """transformers' config; of texts it has what a tower needs."""
    found = decode_json(find_file(folder, CONFIG_FILE), dict[str, Any])
    if found.get("model_type") != ERNIE:
        return AutoConfig.from_pretrained(folder)
    vision: dict[str, Any] = found["vision_config"]
    given = {name: vision[name] for name in OF_IMAGES if name in vision}
    given["intermediate_size"] = int(given["hidden_size"] * vision.get("mlp_ratio", 4))
    for name in ("spatial", "temporal"):
        given[f"{name}_merge_size"] = found.get(f"{name}_conv_size", 2)
    texts = {name: found[name] for name in OF_TEXTS if name in found}
    texts["head_dim"] = HEAD_DIM
    return Ernie4_5_VLMoeConfig(text_config=texts, vision_config=given)
