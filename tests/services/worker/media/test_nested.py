"""Images that the processor's file describes are read as from a file of their own."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.media.preprocessors import read_preprocessor
from services.worker.media.tower import Tower
from shared.media.families import FAMILIES, family_name, read_family
from tests.media.checkpoints import nest, save_checkpoint
from tests.media.gemma3_checkpoints import save_gemma3
from tests.media.gemma4_checkpoints import save_gemma4, save_unified
from tests.media.glm_checkpoints import save_glm
from tests.media.internvl_checkpoints import save_internvl, save_qianfan
from tests.media.lfm_checkpoints import save_lfm2
from tests.media.llava_checkpoints import save_lighton, save_llava, save_mistral3, save_pixtral
from tests.media.pictures import picture

SAVED: dict[str, Callable[[Path], None]] = {
    "Ernie4_5_VLMoeForConditionalGeneration": partial(save_checkpoint, family="ernie4.5-vl"),
    "Gemma3ForConditionalGeneration": save_gemma3,
    "Gemma4ForConditionalGeneration": save_gemma4,
    "Gemma4UnifiedForConditionalGeneration": save_unified,
    "Glm4vForConditionalGeneration": partial(save_glm, kind="glm-4.1v"),
    "Glm4vMoeForConditionalGeneration": partial(save_glm, kind="glm-4.5v"),
    "GlmOcrForConditionalGeneration": save_glm,
    "InternVLForConditionalGeneration": save_internvl,
    "Lfm2VlForConditionalGeneration": save_lfm2,
    "LightOnOcrForConditionalGeneration": save_lighton,
    "LlavaForConditionalGeneration/clip_vision_model": save_llava,
    "LlavaForConditionalGeneration/pixtral": save_pixtral,
    "Mistral3ForConditionalGeneration": save_mistral3,
    "PaddleOCRVLForConditionalGeneration": partial(save_checkpoint, family="paddleocr-vl"),
    "QianfanOCRForConditionalGeneration": save_qianfan,
    "Qwen2_5_VLForConditionalGeneration": save_checkpoint,
    "Qwen3VLForConditionalGeneration": partial(save_checkpoint, family="qwen3-vl"),
    "Qwen3VLMoeForConditionalGeneration": partial(save_checkpoint, family="qwen3-vl-moe"),
    "Qwen3_5ForConditionalGeneration": partial(save_checkpoint, family="qwen3.5"),
    "Qwen3_5MoeForConditionalGeneration": partial(save_checkpoint, family="qwen3.5-moe"),
}


def test_all_families_are_tried() -> None:
    """GLM-4.6V's config has the names of GLM-4.5V, without experts."""
    assert {*FAMILIES} == {*SAVED, "Glm46VForConditionalGeneration"}


@pytest.mark.parametrize("name", SAVED)
def test_the_processors_file_is_read_as_two_files_are(name: str, tmp_path: Path) -> None:
    SAVED[name](tmp_path)
    assert family_name(tmp_path) == name
    family, preprocessor, features = _read(tmp_path)
    nest(tmp_path)
    *others, other_features = _read(tmp_path)
    assert others == [family, preprocessor]
    assert torch.equal(features, other_features)


def _read(folder: Path) -> tuple[Any, Any, torch.Tensor]:
    """The family, the preprocessor, and the features of an image."""
    family = read_family(folder)
    assert family is not None
    size = family.fit(84, 56, family.limits).size
    pixels = np.resize(np.asarray(picture(0, 84, 56)), (*size, 3))
    features = Tower(folder, torch.float32).features(pixels)
    return _numbers(family), read_preprocessor(folder), features


def _numbers(value: Any) -> Any:
    """The fields of a family, and those of its videos."""
    fields = {**vars(value)}
    if fields.get("videos") is not None:
        fields["videos"] = {**vars(fields["videos"])}
        fields["videos"].pop("_fit", None)  # a method of the family
    return fields
