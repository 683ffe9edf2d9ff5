"""Tiny random checkpoints of InternVL and Qianfan-OCR, and transformers' texts for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from tests.media.checkpoints import make_tokenizer, save, text_config
from tests.media.references import Clip, Reference, load_reference

START, END, IMAGE = MEDIA = "<img>", "</img>", "<IMG_CONTEXT>"
TEXT = "<image>"  # of Qianfan-OCR's templates
SIDE, PATCH, MERGE = 56, 14, 2
NUM_TOKENS = (SIDE // PATCH // MERGE) ** 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}


def save_internvl(folder: Path, seed: int = 0, kind: str = "qwen3") -> None:
    """At most six tiles of 56² pixels, each of four tokens."""
    _save(folder, seed, kind, transformers.InternVLConfig, IMAGE + "\n")


def save_qianfan(folder: Path, seed: int = 0) -> None:
    """The template writes a text for each image."""
    _save(folder, seed, "qwen3", transformers.QianfanOCRConfig, TEXT + "\n")
    file = folder / "model.safetensors"
    published = {  # transformers writes names that it does not read
        name.replace("language_model.model.encoder.", "language_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(published, file, {"format": "pt"})


def _save(folder: Path, seed: int, kind: str, config_of: Any, image: str) -> None:
    tokenizer: Any = make_tokenizer(MEDIA, image)
    text = text_config(tokenizer) | {"model_type": kind} | KINDS[kind]
    if kind == "qwen2":
        del text["head_dim"]
    config = config_of(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
            "use_qk_norm": kind == "qwen3",
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=NUM_TOKENS,
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, image_mean=MEAN, image_std=STD, max_patches=6
    )
    model = getattr(transformers, config_of.__name__.replace("Config", "ForConditionalGeneration"))
    save(folder, model, config, tokenizer, images, seed)


@dataclass(frozen=True, slots=True)
class TilesReference(Reference):
    def inputs(
        self, prompt: str, pictures: list, clips: Sequence[Clip] = ()
    ) -> dict[str, torch.Tensor]:
        """The tiles are written as InternVLProcessor does, which needs torchvision."""
        first, *pieces = prompt.replace(TEXT, IMAGE).split(IMAGE)
        found = self.tiles_of(pictures) if pictures else {}
        nums, text = found.pop("num_patches", []), first
        for num, piece in zip(nums, pieces, strict=True):
            text += START + IMAGE * NUM_TOKENS * int(num) + END + piece
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | found

    def frames(self, picture: Image.Image) -> list[Image.Image]:
        """Its tiles, and after several the whole picture."""
        corners = product(range(0, picture.height, SIDE), range(0, picture.width, SIDE))
        tiles = [picture.crop((left, top, left + SIDE, top + SIDE)) for top, left in corners]
        view = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        return [*tiles, view] if len(tiles) > 1 else tiles

    def tiles_of(self, pictures: list) -> dict[str, Any]:
        return dict(self.images(images=pictures, crop_to_patches=True, return_tensors="pt"))


@cache
def tiles_reference(folder: Path) -> TilesReference:
    return TilesReference(*load_reference(folder))
