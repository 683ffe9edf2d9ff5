"""From pixels to the numbers that a tower of transformers takes, family by family."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import msgspec
import numpy as np

from services.worker.media.preprocessor import Preprocessor, by_pixel, channels, squares
from shared.errors import ConfigError
from shared.media import gemma3, internvl, llava, pixtral
from shared.media.families import family_name
from shared.media.family import read_preprocessor_file
from shared.model_folder import CONFIG_FILE, decode_json, find_file


class Qwen2_5_VL(Preprocessor):  # noqa: N801, its name
    """Squares of patches in order, of a frame for each time, or of the same image."""

    names: ClassVar[tuple[str, ...]] = ("visual.",)
    sizes = Preprocessor.sizes | {"temporal_patch_size": "temporal_patch_size"}
    temporal_patch_size: int = 2

    @property
    def patch_numbers(self) -> int:
        return self.temporal_patch_size * super().patch_numbers

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        patch, merge = self.patch_size, self.merge_size
        rows, columns = (side // patch // merge for side in pixels.shape[1:3])
        split = channels(pixels, values).reshape(-1, 3, rows, merge, patch, columns, merge, patch)
        ordered = split.transpose(2, 5, 3, 6, 1, 0, 4, 7)
        shape = *ordered.shape[:5], self.temporal_patch_size, patch, patch
        patches = np.broadcast_to(ordered, shape).reshape(-1, self.patch_numbers)
        grid = np.array([[1, rows * merge, columns * merge]])
        return {"pixel_values": patches, "image_grid_thw": grid}


class Ernie4_5_VL(Qwen2_5_VL):  # noqa: N801, its name
    """The image once: the resampler repeats it. Frames of a video have patches of their own."""

    names = ("vision_tower.", "resampler_model.")
    sizes = Preprocessor.sizes
    temporal_patch_size: Literal[1] = 1

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        if len(pixels) == 1:
            return super().inputs(pixels, values)
        of_frame = partial(super().inputs, values=values)
        patches, grids = zip(*(of_frame(frame).values() for frame in pixels[:, None]), strict=True)
        grid = grids[0] * [len(pixels), 1, 1]
        return {"pixel_values_videos": np.concatenate(patches), "video_grid_thw": grid}


class Pixtral(Preprocessor):
    """The whole image. Sizes of patches are those of the model, as other software has the file's
    own for merged patches or for single ones."""

    names = ("vision_tower.", "multi_modal_projector.")
    num_masks = 2  # a copy may be aligned
    sizes: ClassVar[dict[str, str]] = {}
    patch_size: int = msgspec.field(default=16, name="vision_config.patch_size")
    merge_size: int = msgspec.field(default=1, name="spatial_merge_size")

    def with_sizes(self, folder: Path) -> Self:
        config = decode_json(folder / CONFIG_FILE, pixtral.Config)
        patch = config.vision_config.patch_size
        return msgspec.structs.replace(self, patch_size=patch, merge_size=config.merge)

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        """A single square comes twice: transformers fails at one alone."""
        side = self.patch_size * self.merge_size
        num = 2 if pixels.shape[1:3] == (side, side) else 1
        images = channels(pixels, values).repeat(num, 0)
        return {"pixel_values": images, "image_sizes": np.array([pixels.shape[1:3]] * num)}


class LightOnOcr(Pixtral):
    names = ("vision_encoder.", "vision_projection.")


class PaddleOCRVL(Preprocessor):
    """Patches row by row."""

    names = "visual.", "projector."
    temporal_patch_size: Literal[1] = 1  # the tower's config may have another one, without effect

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        found = squares(pixels, values, self.patch_size)
        grid = np.array([[1, *found.shape[:2]]])
        return {"pixel_values": found.reshape(-1, *found.shape[2:]), "image_grid_thw": grid}


class Frames(Preprocessor):
    """Frames of one size."""

    names = ("vision_tower.", "multi_modal_projector.")
    sizes: ClassVar[dict[str, str]] = {}
    merge_size: int = 1

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        return {"pixel_values": channels(pixels, values)}


class Clip(Frames):
    def with_sizes(self, folder: Path) -> Self:
        vision = decode_json(folder / CONFIG_FILE, llava.Config).vision_config
        return msgspec.structs.replace(self, patch_size=vision.patch_size)


class InternVL(Frames):
    def with_sizes(self, folder: Path) -> Self:
        config = decode_json(folder / CONFIG_FILE, internvl.Config)
        return msgspec.structs.replace(self, patch_size=config.patch, merge_size=config.merge)


class Lfm2Vl(Preprocessor):
    """Patches row by row, with the channels of a pixel side by side."""

    names = ("vision_tower.", "multi_modal_projector.")
    num_masks = 1
    sizes: ClassVar[dict[str, str]] = {"patch_size": "patch_size"}
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    patch_size: int = msgspec.field(default=16, name="encoder_patch_size")
    merge_size: int = msgspec.field(default=2, name="downsample_factor")

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        found = squares(pixels, values, self.patch_size)
        patches = by_pixel(found)
        return {
            "pixel_values": patches,
            "pixel_attention_mask": np.ones(patches.shape[:2], np.int32),
            "spatial_shapes": np.array([found.shape[:2]]),
        }


class Gemma3(Frames):
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def with_sizes(self, folder: Path) -> Self:
        config = decode_json(folder / CONFIG_FILE, gemma3.Config)
        patch = config.vision_config.patch_size
        return msgspec.structs.replace(self, patch_size=patch, merge_size=config.merge)


class Gemma4(Preprocessor):
    """Patches row by row, with the channels of a pixel side by side, and their columns and rows.
    The tower itself shifts values."""

    names: ClassVar[tuple[str, ...]] = ("vision_tower.", "embed_vision.")
    sizes: ClassVar[dict[str, str]] = {
        "patch_size": "patch_size",
        "merge_size": "pooling_kernel_size",
    }
    num_masks = 1
    do_normalize: bool = False
    patch_size: int = 16
    merge_size: int = msgspec.field(default=3, name="pooling_kernel_size")

    @property
    def side(self) -> int:
        """Of a square with a place."""
        return self.patch_size

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        found = squares(pixels, values, self.side)
        places = np.indices(found.shape[:2]).reshape(2, -1)[::-1].T[None]
        return {"pixel_values": by_pixel(found), "image_position_ids": np.ascontiguousarray(places)}


class Gemma4Unified(Gemma4):
    """Tokens are embedded from the squares of their patches, without a tower."""

    names = ("embed_vision.",)
    num_masks = 0

    @property
    def side(self) -> int:
        return self.patch_size * self.merge_size

    def widths(self, vision: Any) -> tuple[int, int]:
        share = -(-vision.mm_embed_dim // self.merge_size**2)
        return share, share


PREPROCESSORS: Mapping[str | None, type[Preprocessor]] = {
    "Ernie4_5_VLMoeForConditionalGeneration": Ernie4_5_VL,
    "Gemma3ForConditionalGeneration": Gemma3,
    "Gemma4ForConditionalGeneration": Gemma4,
    "Gemma4UnifiedForConditionalGeneration": Gemma4Unified,
    "Glm46VForConditionalGeneration": Qwen2_5_VL,
    "Glm4vForConditionalGeneration": Qwen2_5_VL,
    "Glm4vMoeForConditionalGeneration": Qwen2_5_VL,
    "GlmOcrForConditionalGeneration": Qwen2_5_VL,
    "InternVLForConditionalGeneration": InternVL,
    "Lfm2VlForConditionalGeneration": Lfm2Vl,
    "LightOnOcrForConditionalGeneration": LightOnOcr,
    "LlavaForConditionalGeneration/clip_vision_model": Clip,
    "LlavaForConditionalGeneration/pixtral": Pixtral,
    "Mistral3ForConditionalGeneration": Pixtral,
    "PaddleOCRVLForConditionalGeneration": PaddleOCRVL,
    "QianfanOCRForConditionalGeneration": InternVL,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VL,
    "Qwen3VLForConditionalGeneration": Qwen2_5_VL,
    "Qwen3VLMoeForConditionalGeneration": Qwen2_5_VL,
    "Qwen3_5ForConditionalGeneration": Qwen2_5_VL,
    "Qwen3_5MoeForConditionalGeneration": Qwen2_5_VL,
}


class _Config(msgspec.Struct):
    vision_config: dict[str, object] = {}


def read_preprocessor(folder: Path) -> Preprocessor:
    """Raises ConfigError."""
    kind = PREPROCESSORS[family_name(folder)]
    path, given = read_preprocessor_file(folder, kind)
    found = given.with_sizes(folder)
    vision = decode_json(find_file(folder, CONFIG_FILE), _Config).vision_config
    for problem in found.problems(vision):
        raise ConfigError(f"model: {path}: {problem}")
    return found
