"""Images of InternVL 3 and 3.5 (arXiv 2504.10479) and Qianfan-OCR: tiles of one size. Pure."""

from collections.abc import Sequence
from functools import cache
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
    check_ratio,
    read_preprocessor_file,
)
from shared.media.llava import Placeholder, added_ids
from shared.model_folder import CONFIG_FILE, decode_json, find_file

START, END = "<img>", "</img>"
MAX_TILES = 64  # of a file's max_patches


class _Size(msgspec.Struct):
    height: int
    width: int


class _Preprocessor(msgspec.Struct):
    size: _Size
    do_resize: bool = True
    resample: int = BICUBIC
    min_patches: int = 1
    max_patches: int = 12

    def problem(self, side: int) -> str:
        if not self.do_resize or self.resample != BICUBIC:
            return f"images without do_resize or resample {BICUBIC}"
        if not self.size.height == self.size.width == side:
            return (
                f"size is {self.size.height} x {self.size.width}; the tower takes {side} x {side}"
            )
        if not 1 <= self.min_patches <= self.max_patches <= MAX_TILES:
            return (
                f"min_patches is {self.min_patches} and max_patches {self.max_patches}; they may be"
                f" 1 to {MAX_TILES}"
            )
        return ""


class _Vision(msgspec.Struct):
    image_size: int | tuple[int, int] = 448
    patch_size: int | tuple[int, int] = 14


class Config(Placeholder, kw_only=True):
    """config.json"""

    vision_config: _Vision
    downsample_ratio: float = 0.5

    @property
    def side(self) -> int:
        return _side(self.vision_config.image_size)

    @property
    def patch(self) -> int:
        return _side(self.vision_config.patch_size)

    @property
    def merge(self) -> int:
        """The side of a token in patches."""
        return round(1 / self.downsample_ratio)

    def problem(self) -> str:
        vision = self.vision_config
        if not self.side or not self.patch:
            return f"image_size {vision.image_size} or patch_size {vision.patch_size} is no square"
        if not 0 < self.downsample_ratio <= 1 or self.side % (self.patch * self.merge):
            return (
                f"downsample_ratio {self.downsample_ratio} does not divide {self.side} pixels in"
                f" patches of {self.patch}"
            )
        return ""


class Tiles(Family):
    """``num_tokens`` for each tile of ``side`` × ``side`` pixels, between a token of the start and
    one of the end. An image has ``fewest`` tiles to ``most``, and after several a view of the
    whole. ``ids`` name a token, the start and the end."""

    options: tuple[str, ...] = ("max_pixels",)

    def __init__(
        self, ids: Sequence[int], num_tokens: int, side: int, fewest: int, most: int
    ) -> None:
        self.placeholder, self._start, self._end = ids
        self.limits = PixelLimits(1, _num_frames(most) * side * side)
        self._num_tokens = num_tokens
        self._side = side
        self._fewest, self._most = fewest, most

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        side, most = self._side, self._most
        if limits.max_pixels < self.limits.max_pixels:
            most = max(1, limits.max_pixels // (side * side) - 1)
        columns, rows = choose_grid(width, height, side, min(self._fewest, most), most)
        num = _num_frames(columns * rows)
        scaled = columns * side, rows * side
        return Fit((num, side, side), self._tokens_of(num), scaled, is_tiled=True)

    def num_tokens(self, size: Size) -> int:
        num, *sides = size
        if sides != [self._side] * 2 or num == 2 or not 1 <= num <= _num_frames(self._most):
            raise ValueError(f"no image of the model has the size {size}")
        return self._tokens_of(num)

    def ids(self, size: Size) -> np.ndarray:
        ids = np.full(self.num_tokens(size), self.placeholder, np.int32)
        ids[0], ids[-1] = self._start, self._end
        return ids

    def _tokens_of(self, num_frames: int) -> int:
        return 2 + num_frames * self._num_tokens

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), Config)
        if problem := config.problem():
            raise ConfigError(f"model: {folder / CONFIG_FILE}: {problem}")
        path, given = read_preprocessor_file(folder, _Preprocessor)
        if problem := given.problem(config.side):
            raise ConfigError(f"model: {path}: {problem}")
        ids = config.find(folder), *added_ids(folder, START, END)
        num_tokens = (config.side // config.patch // config.merge) ** 2
        return cls(ids, num_tokens, config.side, given.min_patches, given.max_patches)


def _side(size: int | tuple[int, int]) -> int:
    """0 unless it is a square."""
    width, height = (size, size) if isinstance(size, int) else size
    return width if width == height and width > 0 else 0


def _num_frames(num_tiles: int) -> int:
    return num_tiles + (num_tiles > 1)


@cache
def _grids(fewest: int, most: int) -> list[tuple[int, int]]:
    """Columns and rows; grids with the fewest tiles come first."""
    sides = range(1, most + 1)
    grids = ((columns, rows) for columns in sides for rows in sides)
    return sorted((each for each in grids if fewest <= _area(each) <= most), key=_area)


def _area(grid: tuple[int, int]) -> int:
    return grid[0] * grid[1]


def choose_grid(width: int, height: int, side: int, fewest: int, most: int) -> tuple[int, int]:
    """The columns and rows with the ratio nearest to the image's; of equals the last one with less
    than twice the image's pixels."""
    best, best_distance = (1, 1), float("inf")
    for grid in _grids(fewest, most):
        distance = abs(width / height - grid[0] / grid[1])
        is_filled = width * height > 0.5 * side * side * _area(grid)
        if distance < best_distance or (distance == best_distance and is_filled):
            best, best_distance = grid, distance
    return best
