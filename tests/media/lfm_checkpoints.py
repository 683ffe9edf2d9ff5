"""Tiny random checkpoints of LFM2-VL, and transformers' texts for them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from tests.media.checkpoints import make_tokenizer, save, text_config
from tests.media.references import Clip, Reference
from tests.media.videos import without_torchvision

IMAGE, START, END, VIEW = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
LABELS = [f"<|img_row_{row}_col_{column}|>" for row, column in product(range(1, 5), repeat=2)]
PATCH, TILE = 8, 32
FILE = {
    "encoder_patch_size": PATCH,
    "downsample_factor": 2,
    "tile_size": TILE,
    "min_tiles": 2,
    "max_tiles": 4,
    "min_image_tokens": 2,
    "max_image_tokens": 6,
    "max_pixels_tolerance": 2.0,
}
MEAN = STD = 0.5


def save_lfm2(folder: Path, seed: int = 0) -> None:
    """Tiles of 32² pixels, each of four tokens, and views of two to six tokens."""
    tokenizer: Any = make_tokenizer([IMAGE, START, END, VIEW, *LABELS], IMAGE)
    text = {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = transformers.Lfm2VlConfig(
        text_config=text_config(tokenizer) | text,
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "patch_size": PATCH,
            "num_patches": 16,
            "vision_use_head": False,
        },
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        projector_hidden_size=48,
    )
    kind = transformers.Lfm2VlForConditionalGeneration
    save(folder, kind, config, tokenizer, SimpleNamespace(save_pretrained=_save_file), seed)


def _save_file(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(FILE))


@dataclass(frozen=True, slots=True)
class PartsReference(Reference):
    """``images`` is the module of the processor, which needs torchvision to scale."""

    @property
    def side(self) -> int:
        return 2 * PATCH

    def layout(self, width: int, height: int) -> tuple[int, int, tuple[int, int]]:
        """Rows and columns of tiles, 0 for none, and the width and height of the view."""
        kind = self.images.Lfm2VlImageProcessor
        nums = {name: FILE[name] for name in ("encoder_patch_size", "downsample_factor")}
        nums |= {"height": height, "width": width, "max_image_tokens": FILE["max_image_tokens"]}
        view = kind.smart_resize(None, min_image_tokens=FILE["min_image_tokens"], **nums)
        tolerance = FILE["max_pixels_tolerance"]
        if not kind._is_image_too_large(None, max_pixels_tolerance=tolerance, **nums):
            return 0, 0, view
        ratios = SimpleNamespace(_target_ratios=partial(kind._target_ratios.__wrapped__, None))
        tiles = FILE["min_tiles"], FILE["max_tiles"], TILE
        columns, rows, *_ = kind._get_grid_layout(ratios, height, width, *tiles)
        return rows, columns, view

    def written(self, width: int, height: int) -> str:
        rows, columns, (across, down) = self.layout(width, height)
        tokens: Any = SimpleNamespace(
            image_token=IMAGE,
            image_start_token=START,
            image_end_token=END,
            image_thumbnail_token=VIEW,
        )
        nums = (TILE // self.side) ** 2, (across // self.side) * (down // self.side)
        written: str = Lfm2VlProcessor._build_image_tokens(
            tokens, rows, columns, *nums, use_thumbnail=True, use_image_special_tokens=True
        )
        return written

    def items(self, picture: Image.Image) -> list[list[Image.Image]]:
        rows, columns, view = self.layout(*picture.size)
        whole = picture.resize((columns * TILE or 1, rows * TILE or 1), Image.Resampling.BILINEAR)
        corners = product(range(0, rows * TILE, TILE), range(0, columns * TILE, TILE))
        tiles = [whole.crop((left, top, left + TILE, top + TILE)) for top, left in corners]
        return [[each] for each in (*tiles, picture.resize(view, Image.Resampling.BILINEAR))]

    def inputs(
        self, prompt: str, pictures: list, clips: Sequence[Clip] = ()
    ) -> dict[str, torch.Tensor]:
        first, *pieces = prompt.split(IMAGE)
        text = first
        for picture, piece in zip(pictures, pieces, strict=True):
            text += self.written(*picture.size) + piece
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        frames = [frame for picture in pictures for (frame,) in self.items(picture)]
        of_images = self.pixels_of(frames) if frames else {}
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | of_images

    def pixels_of(self, frames: list[Image.Image]) -> dict[str, torch.Tensor]:
        """With as many patches for each, some of them masked."""
        most = max(frame.width * frame.height for frame in frames) // PATCH**2
        padded = []
        for frame in frames:
            values = (torch.tensor(np.asarray(frame)).permute(2, 0, 1)[None] / 255 - MEAN) / STD
            patches = self.images.convert_image_to_patches(values, PATCH)
            padded.append(self.images.pad_along_first_dim(patches, most))
        return {
            "pixel_values": torch.cat([patches for patches, _ in padded]),
            "pixel_attention_mask": torch.stack([mask for _, mask in padded]),
            "spatial_shapes": torch.tensor(
                [[frame.height // PATCH, frame.width // PATCH] for frame in frames]
            ),
        }


@cache
def parts_reference(folder: Path) -> PartsReference:
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    images = without_torchvision("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    return PartsReference(model.eval(), tokenizer, images)
