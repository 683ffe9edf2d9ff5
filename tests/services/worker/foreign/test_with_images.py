"""The texts of models that read images too, by transformers: the tower is neither read nor kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from benchmarks.harness.engines import make_engine
from services.worker.foreign.backend import can_serve
from services.worker.foreign.coded import CodedLinear
from services.worker.models.registry import MODELS, read_architectures
from shared.errors import ConfigError
from tests.services.worker.checkpoints import assert_greedy, random_prompts
from tests.services.worker.driver import Driver, Job
from tests.services.worker.foreign_checkpoints import LATENT, SHARED_EXPERTS, SLIDES, TEXT_OF_GEMMA3
from tests.services.worker.stored_codes import MORE_LAYOUTS, save_quantized

TEXT = {key: value for key, value in TEXT_OF_GEMMA3.items() if key not in SLIDES}
TOWER = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "out_hidden_size": 64,
}
AXES = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
STEP = {
    **SHARED_EXPERTS,
    **SLIDES,
    "share_expert_dim": 32,
    "num_sliding_attention_heads": 6,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4v_moe": {**SHARED_EXPERTS, "rope_parameters": AXES | {"mrope_section": [2, 1, 1]}},
    "muse_glimmer": {"sliding_window": 5},
    "step3p7": STEP,
    "internvl": {"model_type": "qwen3"},
}


def save(folder: Path, kind: str) -> PreTrainedModel:
    """Returns the saved model."""
    config = AutoConfig.for_model(kind, text_config=TEXT | FAMILIES[kind], vision_config=TOWER)
    return save_model_of(config, folder)


def save_model_of(config: Any, folder: Path) -> PreTrainedModel:
    torch.manual_seed(20261129)
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model.eval()


def assert_texts(oracle: Any, folder: Path) -> Any:
    """Texts in chunks are the oracle's. Returns the engine's model."""
    engine = make_engine(folder, model_impl="transformers")
    prompts = random_prompts(4)
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)
    assert can_serve(folder, 64)
    return engine._model


def rename(folder: Path, **names: str | None) -> None:
    """Beginnings of tensors' names, with _ for a dot; None removes the tensors."""
    file = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        for old, new in names.items():
            if name.startswith(old.replace("_", ".", 1)):
                name = "" if new is None else name.replace(old.replace("_", ".", 1), new, 1)
        if name:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("kind", [pytest.param("ministral3", marks=pytest.mark.slow), "mistral4"])
def test_newer_texts_of_mistral_3_are_computed_by_transformers(tmp_path: Path, kind: str) -> None:
    latents = SHARED_EXPERTS | LATENT | {"head_dim": 32} if kind == "mistral4" else {}
    text = TEXT | {"model_type": kind} | latents
    tower = TOWER | {"model_type": "pixtral", "head_dim": 16}
    config = AutoConfig.for_model("mistral3", text_config=text, vision_config=tower)
    oracle = save_model_of(config, tmp_path)
    assert read_architectures(tmp_path)[0] not in MODELS
    assert_texts(oracle, tmp_path)


@pytest.mark.parametrize("kind", FAMILIES)
def test_texts_match_transformers(tmp_path: Path, kind: str) -> None:
    model = assert_texts(save(tmp_path, kind), tmp_path)
    assert not any("Vision" in type(each).__name__ for each in model.modules())


def test_a_folder_without_the_tower_is_served(tmp_path: Path) -> None:
    oracle = save(tmp_path, "glm4v_moe")
    rename(tmp_path, model_visual=None)
    assert_texts(oracle, tmp_path)


def test_a_text_model_that_transformers_has_only_with_images(tmp_path: Path) -> None:
    """Step 3.5 has the names of a model of texts."""
    oracle = save(tmp_path, "step3p7")
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())["text_config"]
    path.write_text(json.dumps(text | {"architectures": ["Step3p5ForCausalLM"]}))
    rename(tmp_path, vision_model=None, vit_large_projector=None)
    assert_texts(oracle, tmp_path)


@pytest.mark.slow
def test_codes_are_kept_and_the_tower_is_not_read(tmp_path: Path) -> None:
    save(tmp_path / "dense", "glm4v_moe")
    values = save_quantized(tmp_path / "dense", tmp_path / "codes", MORE_LAYOUTS["mxfp8"])
    save_file(values, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    oracle = AutoModelForImageTextToText.from_pretrained(tmp_path / "dense").float().eval()
    model = assert_texts(oracle, tmp_path / "codes")
    assert any(isinstance(each, CodedLinear) for each in model.base.modules())


def test_block_diffusion_is_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    text = TEXT | experts | {"num_global_key_value_heads": 1, "global_head_dim": 16}
    transformers.DiffusionGemmaConfig(text_config=text, vision_config=TOWER).save_pretrained(
        tmp_path
    )
    config = json.loads((tmp_path / "config.json").read_text())
    names = ["DiffusionGemmaForBlockDiffusion"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": names}))
    with pytest.raises(ConfigError, match="see the ones behind them"):
        make_engine(tmp_path, load_format="dummy")
