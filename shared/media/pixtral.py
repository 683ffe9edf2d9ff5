"""Images of Pixtral (arXiv 2410.07073), Mistral 3 and LightOnOCR (arXiv 2601.14251). Pure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.media.family import (
    BICUBIC,
    Family,
    Fit,
    PixelLimits,
    Size,
    read_preprocessor_file,
    squares_of,
)
from shared.media.llava import Placeholder, added_ids
from shared.model_folder import CONFIG_FILE, decode_json, find_file

BREAK, END = "[IMG_BREAK]", "[IMG_END]"
MERGING = "mistral3", "lighton_ocr"


class _Size(msgspec.Struct, frozen=True):
    """A length."""

    longest_edge: int | None = None


class Preprocessor(msgspec.Struct):
    """The description of images."""

    size: _Size = _Size(1024)
    do_resize: bool = True
    do_center_crop: bool = False
    resample: int = BICUBIC
    patch_size: int | dict[str, int] = 16

    @property
    def side(self) -> int:
        """Of a patch; 0 if it is no square."""
        size = self.patch_size
        if isinstance(size, int):
            return size
        height, width = size.get("height", 0), size.get("width", 0)
        return height if height == width else 0

    def problem(self) -> str:
        if not self.do_resize or self.do_center_crop:
            return "images without do_resize, or with do_center_crop"
        if self.resample != BICUBIC:
            return f"resample {self.resample} is not supported; only {BICUBIC}, bicubic, is"
        return "" if self.size.longest_edge else "size has no longest_edge"


class _Vision(msgspec.Struct):
    patch_size: int = 16


class Config(Placeholder, kw_only=True):
    """config.json of Mistral 3 and LightOnOCR, which merge patches, or of LLaVA."""

    vision_config: _Vision
    model_type: str
    spatial_merge_size: int = 2
    vision_feature_select_strategy: str = "default"

    @property
    def merge(self) -> int:
        return self.spatial_merge_size if self.model_type in MERGING else 1

    def problem(self) -> str:
        strategy = self.vision_feature_select_strategy
        if self.model_type in MERGING or strategy == "full":
            return ""
        return f"vision_feature_select_strategy {strategy!r} is not for Pixtral; only 'full' is"


class RowsOfPatches(Family):
    """A token for each square of ``side`` × ``side`` pixels. ``ids`` are of a token, of the
    break behind a row, and of the end behind the last row."""

    options: tuple[str, ...] = ("max_pixels",)

    def __init__(self, ids: Sequence[int], side: int, longest: int) -> None:
        self.placeholder, self._break, self._end = ids
        self._side = side
        self._longest = longest
        largest = side * math.ceil(longest / side)
        self.limits = PixelLimits(1, largest * largest)

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        longest, side = self._longest, self._side
        if limits.max_pixels < self.limits.max_pixels:  # of the square that an image fits into
            longest = max(1, math.isqrt(limits.max_pixels) // side) * side
        if max(width, height) > longest * min(width, height):
            raise ValueError(
                f"is {width} x {height} pixels; one side may be {longest} times the other"
            )
        ratio = max(1.0, height / longest, width / longest)
        rows, columns = (math.ceil(math.floor(each / ratio) / side) for each in (height, width))
        size = 1, rows * side, columns * side
        return Fit(size, self.num_tokens(size))

    def num_tokens(self, size: Size) -> int:
        rows, columns = squares_of(size, self._side)
        return rows * (columns + 1)

    def ids(self, size: Size) -> np.ndarray:
        rows, columns = squares_of(size, self._side)
        ids = np.full((rows, columns + 1), self.placeholder, np.int32)
        ids[:, -1] = self._break
        ids[-1, -1] = self._end
        return ids.reshape(-1)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), Config)
        if problem := config.problem():
            raise ConfigError(f"model: {folder / CONFIG_FILE}: {problem}")
        path, given = read_preprocessor_file(folder, Preprocessor)
        if problem := cls.problem(given):
            raise ConfigError(f"model: {path}: {problem}")
        assert given.size.longest_edge is not None
        return cls.make(folder, config, given, given.size.longest_edge)

    @classmethod
    def problem(cls, given: Preprocessor) -> str:
        """Why images of this description are not supported, or empty."""
        return given.problem()

    @classmethod
    def make(cls, folder: Path, config: Config, given: Preprocessor, longest: int) -> Self:
        """Raises ConfigError."""
        ids = config.find(folder), *added_ids(folder, BREAK, END)
        return cls(ids, config.vision_config.patch_size * config.merge, longest)


class UnbrokenRows(RowsOfPatches):
    """Of LightOnOCR. Sides are multiples of the patches in the preprocessor's file. Pixels behind
    the last whole token, of ``side_of_token``, are left out."""

    def __init__(self, placeholder: int, side: int, side_of_token: int, longest: int) -> None:
        super().__init__([placeholder] * 3, side, longest)
        self._side_of_token = side_of_token

    def num_tokens(self, size: Size) -> int:
        _, height, width = size
        squares_of(size, self._side)
        side = self._side_of_token
        if min(height, width) < side:
            raise ValueError(
                f"is scaled to {width} x {height} pixels; a token has {side} x {side} of them"
            )
        return (height // side) * (width // side)

    def ids(self, size: Size) -> np.ndarray:
        return np.full(self.num_tokens(size), self.placeholder, np.int32)

    @classmethod
    def problem(cls, given: Preprocessor) -> str:
        no_square = "" if given.side > 0 else f"patch_size {given.patch_size} is no square"
        return super().problem(given) or no_square

    @classmethod
    def make(cls, folder: Path, config: Config, given: Preprocessor, longest: int) -> Self:
        side_of_token = config.vision_config.patch_size * config.merge
        return cls(config.find(folder), given.side, side_of_token, longest)
