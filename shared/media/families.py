"""The families with images, by their name in config.json."""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from shared.media.ernie4_5_vl import ErnieSquares
from shared.media.family import Family, describes_images
from shared.media.gemma3 import StretchedSquare
from shared.media.gemma4 import FilledRows, WholeRows
from shared.media.internvl import Tiles
from shared.media.lfm2_vl import TilesAndView
from shared.media.llava import CroppedSquare
from shared.media.pixtral import RowsOfPatches, UnbrokenRows
from shared.media.qwen2_5_vl import RaisedSquares, RepeatedSquares, SquaresInTime
from shared.media.qwen3_vl import DeepSquares, LabelledSquares
from shared.model_folder import CONFIG_FILE, decode_json, find_file
from shared.wire.messages import MediumKind

FAMILIES: Mapping[str, Callable[[Path], Family]] = {
    "Ernie4_5_VLMoeForConditionalGeneration": ErnieSquares.read,
    "Gemma3ForConditionalGeneration": StretchedSquare.read,
    "Gemma4ForConditionalGeneration": FilledRows.read,
    "Gemma4UnifiedForConditionalGeneration": WholeRows.read,
    "Glm46VForConditionalGeneration": RepeatedSquares.read,
    "Glm4vForConditionalGeneration": RepeatedSquares.read,
    "Glm4vMoeForConditionalGeneration": RepeatedSquares.read,
    "GlmOcrForConditionalGeneration": RepeatedSquares.read,
    "InternVLForConditionalGeneration": Tiles.read,
    "Lfm2VlForConditionalGeneration": TilesAndView.read,
    "LightOnOcrForConditionalGeneration": UnbrokenRows.read,
    "LlavaForConditionalGeneration/clip_vision_model": CroppedSquare.read,
    "LlavaForConditionalGeneration/pixtral": RowsOfPatches.read,
    "Mistral3ForConditionalGeneration": RowsOfPatches.read,
    "PaddleOCRVLForConditionalGeneration": RaisedSquares.read,
    "QianfanOCRForConditionalGeneration": Tiles.read,
    "Qwen2_5_VLForConditionalGeneration": SquaresInTime.read,
    "Qwen3VLForConditionalGeneration": DeepSquares.read,
    "Qwen3VLMoeForConditionalGeneration": DeepSquares.read,
    "Qwen3_5ForConditionalGeneration": LabelledSquares.read,
    "Qwen3_5MoeForConditionalGeneration": LabelledSquares.read,
}
"""Each reads a model's folder, and raises ConfigError. A name may have the tower's kind."""

WRITTEN: Mapping[str, Mapping[str, MediumKind]] = {
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "<|image@placeholder|>": "image",
        "<|video@placeholder|>": "video",
    },
    "QianfanOCRForConditionalGeneration": {"<image>": "image"},
}
"""Texts that published templates have in place of placeholders, as a model's own software replaces
them."""


class _Vision(msgspec.Struct):
    model_type: str = ""


class _Config(msgspec.Struct):
    architectures: list[str] = []
    vision_config: _Vision | None = None

    @property
    def names(self) -> list[str]:
        tower = "" if self.vision_config is None else self.vision_config.model_type
        return [*self.architectures, *(f"{name}/{tower}" for name in self.architectures)]


def family_name(folder: Path) -> str | None:
    """None for a model without images, and for one of an unknown family."""
    names = decode_json(find_file(folder, CONFIG_FILE), _Config).names
    return next((name for name in names if name in FAMILIES), None)


def written_by_templates(folder: Path) -> Mapping[str, MediumKind]:
    """Texts in place of placeholders."""
    return WRITTEN.get(family_name(folder) or "", {})


def read_family(folder: Path) -> Family | None:
    """None for a model without images, and for one whose images are not supported. Raises
    ConfigError."""
    name = family_name(folder)
    if name is None or not describes_images(folder):
        return None
    return FAMILIES[name](folder)
