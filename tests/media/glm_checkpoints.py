"""Tiny random checkpoints of GLM-4.1V, 4.5V and GLM-OCR, and transformers' texts for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests.media.checkpoints import make_tokenizer, save, text_config
from tests.media.families import ERNIE_IDS
from tests.media.references import Clip, Reference, load_reference

START, END, IMAGE, VIDEO = MEDIA = (
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|image|>",
    "<|video|>",
)
ROTATIONS = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [1, 1, 2],
}
EXPERTS = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "glm-4.1v": (transformers.Glm4vConfig, transformers.Glm4vForConditionalGeneration, {}),
    "glm-ocr": (transformers.GlmOcrConfig, transformers.GlmOcrForConditionalGeneration, {}),
    "glm-4.5v": (
        transformers.Glm4vMoeConfig,
        transformers.Glm4vMoeForConditionalGeneration,
        EXPERTS,
    ),
}


def save_glm(folder: Path, seed: int = 0, kind: str = "glm-ocr") -> None:
    """Images of 56² to 280² pixels, which count twice."""
    config, model, text = KINDS[kind]
    tokenizer: Any = make_tokenizer(MEDIA, START + IMAGE + END)
    made = config(
        text_config=text_config(tokenizer) | {"rope_parameters": ROTATIONS} | text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "depth": 2,
            "num_heads": 2,
            "image_size": 112,
        },
        **dict(zip(ERNIE_IDS, tokenizer.convert_tokens_to_ids([*MEDIA]), strict=True)),
    )
    images = Glm4vImageProcessorPil(
        size={"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 280 * 280}
    )
    save(folder, model, made, tokenizer, images, seed)


@dataclass(frozen=True, slots=True)
class GlmReference(Reference):
    def inputs(
        self, prompt: str, pictures: list, clips: Sequence[Clip] = ()
    ) -> dict[str, torch.Tensor]:
        """The placeholders are repeated as Glm4vProcessor does, which needs torchvision."""
        found = dict(self.images(images=pictures, return_tensors="pt")) if pictures else {}
        first, *pieces = prompt.split(IMAGE)
        text = first
        for grid, piece in zip(found.get("image_grid_thw", ()), pieces, strict=True):
            text += IMAGE * (int(grid.prod()) // 4) + piece
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        kinds = (ids == self.model.config.image_token_id).int()
        return (
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            | found
            | ({"mm_token_type_ids": kinds} if pictures else {})
        )


@cache
def glm_reference(folder: Path) -> GlmReference:
    return GlmReference(*load_reference(folder))
