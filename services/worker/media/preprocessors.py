"""From pixels to the numbers that a tower of transformers takes, family by family."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.media import gemma3, internvl, llava, pixtral
from shared.media.families import family_name
from shared.media.family import read_preprocessor_file
from shared.model_folder import CONFIG_FILE, decode_json, find_file


class Preprocessor(msgspec.Struct):
    """The description of images; the defaults are those of the class it names. The names of a
    tower's tensors have one of ``names`` in them. Sizes must be those that its config has by other
    names."""

    names: ClassVar[tuple[str, ...]]
    num_masks: ClassVar[int] = 0  # of every patch for every patch, in attention
    sizes: ClassVar[dict[str, str]] = {
        "patch_size": "patch_size",
        "merge_size": "spatial_merge_size",
    }

    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    do_rescale: bool = True
    do_normalize: bool = True
    patch_size: int = 14
    merge_size: int = 2

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        return read_preprocessor_file(folder, cls)[1]

    @property
    def patch_numbers(self) -> int:
        return 3 * self.patch_size**2

    @property
    def values(self) -> np.ndarray:
        """[3, 256] float32: what each byte of a channel becomes, by the operations of transformers'
        PIL backend."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        given = (self.image_mean, self.image_std) if self.do_normalize else ([0.0] * 3, [1.0] * 3)
        mean, std = (np.array(each, np.float32)[:, None] for each in given)
        values: np.ndarray = (scaled - mean) / std
        return values

    @abstractmethod
    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        """pixels [frames, height, width, 3] uint8 → what ``get_image_features`` takes, by name; or
        what ``get_video_features`` takes, with a ``video_grid_thw``."""

    def widths(self, vision: Any) -> tuple[int, int]:
        """The hidden and the inner size of a patch in a tower with the config ``vision``."""
        return vision.hidden_size, vision.intermediate_size

    def problems(self, vision: Mapping[str, object]) -> list[str]:
        """Why the file is not supported, with a tower of the config ``vision``."""
        problems, default = [], type(self)()
        for name in ("do_rescale", "do_normalize"):
            if (value := getattr(self, name)) != (wanted := getattr(default, name)):
                problems.append(f"{name} is {value}; only {wanted} is supported")
        in_file = dict(zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True))
        for name, in_vision in self.sizes.items():
            value, wanted = getattr(self, name), vision.get(in_vision, getattr(default, name))
            if value != wanted:
                problems.append(f"{in_file[name]} is {value}; the tower takes {wanted}")
        return problems


def channels(pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[frames, height, width, 3] uint8 → [frames, 3, height, width] float32"""
    return np.stack([values[each][pixels[..., each]] for each in range(3)], 1)


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

    @classmethod
    def read(cls, folder: Path) -> Self:
        config, found = decode_json(folder / CONFIG_FILE, pixtral.Config), super().read(folder)
        patch = config.vision_config.patch_size
        return msgspec.structs.replace(found, patch_size=patch, merge_size=config.merge)

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
        patch = self.patch_size
        rows, columns = (side // patch for side in pixels.shape[1:3])
        split = channels(pixels, values).reshape(3, rows, patch, columns, patch)
        patches = split.transpose(1, 3, 0, 2, 4).reshape(-1, 3, patch, patch)
        return {"pixel_values": patches, "image_grid_thw": np.array([[1, rows, columns]])}


class Frames(Preprocessor):
    """Frames of one size."""

    names = ("vision_tower.", "multi_modal_projector.")
    sizes: ClassVar[dict[str, str]] = {}
    merge_size: int = 1

    def inputs(self, pixels: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        return {"pixel_values": channels(pixels, values)}


class Clip(Frames):
    @classmethod
    def read(cls, folder: Path) -> Self:
        vision = decode_json(folder / CONFIG_FILE, llava.Config).vision_config
        return msgspec.structs.replace(super().read(folder), patch_size=vision.patch_size)


class InternVL(Frames):
    @classmethod
    def read(cls, folder: Path) -> Self:
        config, found = decode_json(folder / CONFIG_FILE, internvl.Config), super().read(folder)
        return msgspec.structs.replace(found, patch_size=config.patch, merge_size=config.merge)


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
        patch = self.patch_size
        rows, columns = (side // patch for side in pixels.shape[1:3])
        split = channels(pixels, values).reshape(3, rows, patch, columns, patch)
        patches = split.transpose(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
        return {
            "pixel_values": patches,
            "pixel_attention_mask": np.ones(patches.shape[:2], np.int32),
            "spatial_shapes": np.array([[rows, columns]]),
        }


class Gemma3(Frames):
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    @classmethod
    def read(cls, folder: Path) -> Self:
        config, found = decode_json(folder / CONFIG_FILE, gemma3.Config), super().read(folder)
        patch = config.vision_config.patch_size
        return msgspec.structs.replace(found, patch_size=patch, merge_size=config.merge)


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
        side = self.side
        rows, columns = (each // side for each in pixels.shape[1:3])
        split = channels(pixels, values).reshape(3, rows, side, columns, side)
        patches = split.transpose(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
        places = np.indices((rows, columns)).reshape(2, -1)[::-1].T[None]
        return {"pixel_values": patches, "image_position_ids": np.ascontiguousarray(places)}


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
    path, _ = read_preprocessor_file(folder, kind)
    found = kind.read(folder)
    vision = decode_json(find_file(folder, CONFIG_FILE), _Config).vision_config
    for problem in found.problems(vision):
        raise ConfigError(f"model: {path}: {problem}")
    return found
