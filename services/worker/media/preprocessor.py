"""The description of images in a model's folder, and pixels as numbers."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np


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

    def with_sizes(self, folder: Path) -> Self:
        """With the sizes of patches in the model's config, where the file has others. Raises
        ConfigError."""
        return self

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


def squares(pixels: np.ndarray, values: np.ndarray, side: int) -> np.ndarray:
    """[1, height, width, 3] uint8 → [rows, columns, 3, side, side] float32"""
    rows, columns = (each // side for each in pixels.shape[1:3])
    split = channels(pixels, values).reshape(3, rows, side, columns, side)
    return split.transpose(1, 3, 0, 2, 4)


def by_pixel(found: np.ndarray) -> np.ndarray:
    """[rows, columns, 3, side, side] → [1, rows · columns, side · side · 3]"""
    return found.transpose(0, 1, 3, 4, 2).reshape(1, found.shape[0] * found.shape[1], -1)
