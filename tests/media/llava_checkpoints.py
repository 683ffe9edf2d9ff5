"""Tiny random checkpoints of Mistral 3, Pixtral, LightOnOCR and LLaVA 1.5, and transformers' texts
for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.media.checkpoints import make_tokenizer, save, text_config
from tests.media.references import Clip, Reference, load_reference

MEDIA = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
PATCH = 14
LONGEST = 224


def save_mistral3(folder: Path, seed: int = 0) -> None:
    """Squares of 28² pixels."""
    tokenizer: Any = make_tokenizer(MEDIA, MEDIA[0])
    config = transformers.Mistral3Config(
        text_config=_text(tokenizer),
        vision_config=_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids(MEDIA[0]),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    kind = transformers.Mistral3ForConditionalGeneration
    save(folder, kind, config, tokenizer, _images(2 * PATCH), seed)


def save_pixtral(folder: Path, seed: int = 0) -> None:
    """In the layout of LLaVA. Squares of 14² pixels."""
    tokenizer: Any = make_tokenizer(MEDIA, MEDIA[0])
    config = transformers.LlavaConfig(
        text_config=_text(tokenizer),
        vision_config=_vision(),
        image_token_index=tokenizer.convert_tokens_to_ids(MEDIA[0]),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    kind = transformers.LlavaForConditionalGeneration
    save(folder, kind, config, tokenizer, _images(PATCH), seed)


def save_lighton(folder: Path, seed: int = 0, side: int = PATCH) -> None:
    """Squares of 28² pixels, of images with sides of ``side`` · n."""
    tokenizer: Any = make_tokenizer(MEDIA, MEDIA[0])
    config = transformers.LightOnOcrConfig(
        text_config=text_config(tokenizer) | {"model_type": "qwen3"},
        vision_config=_vision(),
        image_token_id=tokenizer.convert_tokens_to_ids(MEDIA[0]),
    )
    kind = transformers.LightOnOcrForConditionalGeneration
    save(folder, kind, config, tokenizer, _images(side), seed)


def save_llava(folder: Path, seed: int = 0, strategy: Any = "default") -> None:
    """Images of 56² pixels."""
    tokenizer: Any = make_tokenizer(["<image>"], "<image>")
    text = _text(tokenizer)
    del text["sliding_window"]
    config = transformers.LlavaConfig(
        text_config=text | {"model_type": "llama"},
        vision_config=_vision()
        | {"model_type": "clip_vision_model", "image_size": 56, "num_hidden_layers": 3},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=16,
        vision_feature_select_strategy=strategy,
    )
    images = transformers.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
    )
    save(folder, transformers.LlavaForConditionalGeneration, config, tokenizer, images, seed)


def _text(tokenizer: Any) -> dict[str, Any]:
    return text_config(tokenizer) | {"model_type": "mistral", "sliding_window": None}


def _vision() -> dict[str, Any]:
    return {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": LONGEST,
        "patch_size": PATCH,
    }


def _images(side: int) -> Any:
    kind = transformers.models.pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil
    return kind(size={"longest_edge": LONGEST}, patch_size={"height": side, "width": side})


@dataclass(frozen=True, slots=True)
class RowsReference(Reference):
    """Of images in rows."""

    def inputs(
        self, prompt: str, pictures: list, clips: Sequence[Clip] = ()
    ) -> dict[str, torch.Tensor]:
        """The rows are written as PixtralProcessor does, which needs torchvision."""
        found = dict(self.images(images=pictures, return_tensors="pt")) if pictures else {}
        first, *pieces = prompt.split(MEDIA[0])
        sizes = found["image_sizes"].tolist() if pictures else []
        side, text = self.side, first
        for (height, width), piece in zip(sizes, pieces, strict=True):
            rows = [MEDIA[0] * (width // side)] * (height // side)
            text += self.written(rows) + piece
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | found

    @property
    def side(self) -> int:
        merge = getattr(self.model.config, "spatial_merge_size", 1)
        return PATCH * merge

    def written(self, rows: list[str]) -> str:
        return MEDIA[1].join(rows) + MEDIA[2]


@dataclass(frozen=True, slots=True)
class UnbrokenReference(RowsReference):
    """Of LightOnOCR."""

    def written(self, rows: list[str]) -> str:
        return "".join(rows)


@cache
def rows_reference(folder: Path) -> RowsReference:
    fields = load_reference(folder)
    is_broken = fields[0].config.model_type != "lighton_ocr"
    return (RowsReference if is_broken else UnbrokenReference)(*fields)


@dataclass(frozen=True, slots=True)
class SquareReference(Reference):
    """Of LLaVA."""

    def inputs(
        self, prompt: str, pictures: list, clips: Sequence[Clip] = ()
    ) -> dict[str, torch.Tensor]:
        found = dict(self.images(images=pictures, return_tensors="pt")) if pictures else {}
        num = 16 + (self.model.config.vision_feature_select_strategy == "full")
        text = prompt.replace("<image>", "<image>" * num)
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | found


@cache
def square_reference(folder: Path) -> SquareReference:
    return SquareReference(*load_reference(folder))
