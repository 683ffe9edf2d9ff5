"""Images of LFM2-VL (arXiv 2511.23404): tiles, and a view of the whole image. Pure."""

import math
from itertools import product
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from shared.errors import ConfigError
from shared.media.family import (
    Family,
    Fit,
    PixelLimits,
    Size,
    check_ratio,
    read_preprocessor_file,
    squares_of,
)
from shared.media.internvl import MAX_TILES, choose_grid
from shared.media.llava import Placeholder
from shared.model_folder import CONFIG_FILE, decode_json, find_file

BILINEAR = 2  # Pillow's number
START, VIEW, END = "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>"


class Preprocessor(msgspec.Struct):
    """The description of images."""

    downsample_factor: int = 2
    do_image_splitting: bool = True
    min_tiles: int = 2
    max_tiles: int = 10
    use_thumbnail: bool = True
    min_image_tokens: int = 64
    max_image_tokens: int = 256
    encoder_patch_size: int = 16
    tile_size: int = 512
    max_pixels_tolerance: float = 2.0
    do_resize: bool = True
    resample: int = BILINEAR

    @property
    def side(self) -> int:
        """Of a token, in pixels."""
        return self.encoder_patch_size * self.downsample_factor

    def problem(self) -> str:
        least, most, tile = self.min_image_tokens, self.max_image_tokens, self.tile_size
        if not self.do_resize or self.resample != BILINEAR:
            return f"images without do_resize or resample {BILINEAR}"
        if not 1 <= least <= most or self.side < 1:
            return f"min_image_tokens is {least} and max_image_tokens {most}, of {self.side} pixels"
        if not self.do_image_splitting:
            return ""
        if not self.use_thumbnail or not 2 <= self.min_tiles <= self.max_tiles <= MAX_TILES:
            return (
                f"min_tiles is {self.min_tiles} and max_tiles {self.max_tiles}; they may be 2 to"
                f" {MAX_TILES}, with use_thumbnail"
            )
        if tile % self.side or not 1 <= (tile // self.side) ** 2 <= most:
            return f"tile_size is {tile}; a token has {self.side} pixels, an image {most} tokens"
        return ""


class Config(Placeholder, kw_only=True):
    """config.json"""

    downsample_factor: int = 2


class Parts(NamedTuple):
    """An image: tiles of ``tile`` × ``tile`` pixels in ``rows`` and ``columns``, if there are some,
    and a view of the whole."""

    rows: int
    columns: int
    tile: int
    view: Fit

    @property
    def sizes(self) -> list[Size]:
        """Of the items, in order."""
        return [(1, self.tile, self.tile)] * (self.rows * self.columns) + [self.view.size]

    @property
    def texts(self) -> list[str]:
        """Before each item, and behind the last one."""
        if not self.rows:
            return [START, END]
        places = product(range(1, self.rows + 1), range(1, self.columns + 1))
        labels = [f"<|img_row_{row}_col_{column}|>" for row, column in places]
        return [START + labels[0], *labels[1:], VIEW, END]


class TilesAndView(Family):
    """A token for each square of ``side`` × ``side`` pixels. Each tile and the view is an item;
    between them are texts. An image that is scaled by ``max_pixels`` has no tiles."""

    options: tuple[str, ...] = ("min_pixels", "max_pixels")

    def __init__(self, placeholder: int, given: Preprocessor) -> None:
        self.placeholder = placeholder
        self._given = given
        self._side = given.side
        area = given.side**2
        self.limits = PixelLimits(given.min_image_tokens * area, given.max_image_tokens * area)

    def parts(self, width: int, height: int, limits: PixelLimits) -> Parts:
        """Raises ValueError for an image that the model does not take."""
        given, view = self._given, self.fit(width, height, limits)
        has_parts = limits.has_parts and limits.max_pixels >= self.limits.max_pixels
        if not has_parts or not self._is_large(width, height):
            return Parts(0, 0, 0, view)
        tile = given.tile_size
        columns, rows = choose_grid(width, height, tile, given.min_tiles, given.max_tiles)
        return Parts(rows, columns, tile, view)

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        """The view."""
        check_ratio(width, height)
        side = self._side
        rows, columns = (max(1, round(each / side)) for each in (height, width))
        if rows * columns * side * side > limits.max_pixels:
            scale = math.sqrt(height * width / limits.max_pixels)
            rows, columns = (max(1, math.floor(each / scale / side)) for each in (height, width))
        elif rows * columns * side * side < limits.min_pixels:
            scale = math.sqrt(limits.min_pixels / (height * width))
            rows, columns = (math.ceil(each * scale / side) for each in (height, width))
        return Fit((1, rows * side, columns * side), rows * columns)

    def num_tokens(self, size: Size) -> int:
        rows, columns = squares_of(size, self._side)
        return rows * columns

    def _is_large(self, width: int, height: int) -> bool:
        given, side = self._given, self._side
        if not given.do_image_splitting:
            return False
        least = given.encoder_patch_size
        down, across = (max(least, round(each / side) * side) for each in (height, width))
        return down * across > self.limits.max_pixels * given.max_pixels_tolerance

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), Config)
        path, given = read_preprocessor_file(folder, Preprocessor)
        problem = given.problem()
        if given.downsample_factor != config.downsample_factor:
            problem = (
                f"downsample_factor is {given.downsample_factor}; the tower takes"
                f" {config.downsample_factor}"
            )
        if problem:
            raise ConfigError(f"model: {path}: {problem}")
        return cls(config.find(folder), given)
