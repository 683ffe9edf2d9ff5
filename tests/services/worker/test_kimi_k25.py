"""Kimi K2.5 and later: DeepSeek-V3's layers within a model that reads images, without images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Kimi_K25ForConditionalGeneration

from benchmarks.harness.engines import KERNELS
from shared.model_folder import SINGLE_FILE
from tests.services.worker.checkpoints import (
    EOS_ID,
    MAX_POSITIONS,
    VOCAB_SIZE,
    change_config,
    random_prompts,
    save_model,
)
from tests.services.worker.forward import our_logits
from tests.services.worker.test_families import CASES

TEXT: dict[str, Any] = {
    **CASES["deepseek v3, yarn"][1],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_ID,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 4,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}


NAMES = {
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.mm_projector.": "mm_projector.",
    "lm_head.": "language_model.lm_head.",
}
"""Beginnings of names in transformers, and on the hub."""
PARTS = "gate", "up"


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With a tensor for each expert."""
    found = {}
    for name, tensor in tensors.items():
        ours = next(each for each in NAMES if name.startswith(each))
        name = NAMES[ours] + name.removeprefix(ours)
        experts, _, kind = name.rpartition(".experts.")
        for expert, own in enumerate(tensor if experts else []):
            parts = (
                {"down": own}
                if kind == "down_proj"
                else dict(zip(PARTS, own.chunk(2), strict=True))
            )
            for part, each in parts.items():
                found[f"{experts}.experts.{expert}.{part}_proj.weight"] = each.contiguous()
        if not experts:
            found[name] = tensor
    return found


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("spelling", ["KimiK25", "Kimi_K25"])
def test_logits_match_transformers(tmp_path: Path, kernels: str, spelling: str) -> None:
    shape: dict[str, Any] = {"text_config": TEXT, "vision_config": VISION}
    shape |= {"projection_hidden_size": 32, "tie_word_embeddings": False}
    save_model(tmp_path, Kimi_K25ForConditionalGeneration, "10MB", **shape)
    oracle: Any = Kimi_K25ForConditionalGeneration.from_pretrained(tmp_path).eval()
    save_file(published(oracle.state_dict()), tmp_path / SINGLE_FILE, {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    text["model_type"] = "kimi_k2"
    change_config(tmp_path, architectures=[f"{spelling}ForConditionalGeneration"], text_config=text)
    prompts = random_prompts(4)
    for prompt, found in zip(
        prompts, our_logits(tmp_path, prompts, torch.float32, kernels), strict=True
    ):
        with torch.inference_mode():
            expected = oracle(input_ids=torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)
