"""The texts of hybrid models that read images too, without images."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from benchmarks.harness.engines import KERNELS, make_engine
from services.worker.models.registry import MODELS
from tests.services.worker.checkpoints import assert_greedy, random_prompts
from tests.services.worker.driver import Driver, Job
from tests.services.worker.hybrids import OF_TEXT

TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LFM: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"] * 2,
    "intermediate_size": 96,
    "block_multiple_of": 32,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lfm2_vl": (OF_TEXT | LFM, {}),
    "minicpmv4_6": (OF_TEXT | {"intermediate_size": 96}, {"insert_layer_id": 0}),
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", FAMILIES)
def test_texts_match_transformers(tmp_path: Path, kind: str, kernels: str) -> None:
    text, others = FAMILIES[kind]
    config = AutoConfig.for_model(kind, text_config=text, vision_config=TOWER, **others)
    torch.manual_seed(20261129)
    oracle = AutoModelForImageTextToText.from_config(config).eval()
    if type(oracle).__name__ not in MODELS:
        pytest.skip(f"{type(oracle).__name__} is gone")
    oracle.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    prompts = random_prompts(4)
    engine = make_engine(tmp_path, kernels)
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, generated in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, generated)
