"""Adapters written by PEFT change weights as PEFT's own merge does."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from services.worker.adapters.folder import AdapterFolder
from services.worker.adapters.sites import Layers

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "options",
    [
        {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
        {"r": 8, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
        {
            "r": 8,
            "target_modules": ["k_proj", "o_proj", "gate_proj", "down_proj"],
            "rank_pattern": {"o_proj": 2, r"layers\.1\.mlp\.down_proj": 6},
            "alpha_pattern": {"model.layers.0.self_attn.k_proj": 20, r"mlp\..*": 5},
        },
        {"r": 4, "target_modules": ["up_proj"], "layers_to_transform": [1]},
    ],
    ids=["two layers", "rslora", "patterns", "one layer"],
)
# Of transformers, for a name that PEFT still uses.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_merged_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    base = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    config = LoraConfig(task_type="CAUSAL_LM", **options)
    adapted = get_peft_model(copy.deepcopy(base), config)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(str(tmp_path))

    merged = PeftModel.from_pretrained(copy.deepcopy(base), str(tmp_path)).merge_and_unload()
    layers = {
        name: (layer.out_features, layer.in_features)
        for name, layer in base.named_modules()
        if isinstance(layer, torch.nn.Linear) and name != "lm_head"
    }
    found = AdapterFolder("sql", tmp_path, Layers(layers), max_rank=8).read(torch.float32)
    assert found.layers
    for name in layers:
        weight = base.get_submodule(name).weight
        if name in found.layers:
            weight = weight + found.layers[name].b @ found.layers[name].a
        assert torch.allclose(weight, merged.get_submodule(name).weight, atol=1e-6)
