"""Images and videos of Qwen2.5-VL (arXiv 2502.13923), and images of GLM-4.1V to 4.6V (2507.01006),
GLM-OCR and PaddleOCR-VL (2510.14528). Pure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.media.family import (
    BICUBIC,
    Family,
    Fit,
    PixelLimits,
    Size,
    VideoLimits,
    check_ratio,
    read_preprocessor_file,
    squares_of,
)
from shared.media.video import PairsInTime
from shared.media.video_file import read_limits
from shared.model_folder import CONFIG_FILE, decode_json, find_file
from shared.wire.messages import Item


class _Preprocessor(msgspec.Struct):
    """``size`` holds areas too."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    size: dict[str, Any] | None = None
    patch_size: int = 14
    merge_size: int = 2
    do_resize: bool = True
    resample: int = BICUBIC


class _Config(msgspec.Struct):
    image_token_id: int | None = None
    im_patch_id: int | None = None  # of ERNIE-4.5-VL as published


class SquaresOfPatches(Family):
    """A token for each square of ``merge`` × ``merge`` patches of ``patch`` × ``patch`` pixels, at
    the square's row and column."""

    default_limits: ClassVar = PixelLimits(56 * 56, 28 * 28 * 1280)
    options: tuple[str, ...] = ("min_pixels", "max_pixels", "size")

    def __init__(self, placeholder: int, patch: int, merge: int, limits: PixelLimits) -> None:
        self.placeholder = placeholder
        self.limits = limits
        self.side = patch * merge

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        side = self.side
        check_ratio(width, height)
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side * side > limits.max_pixels:
            scale = math.sqrt(height * width / limits.max_pixels)
            rows = max(1, math.floor(height / scale / side))
            columns = max(1, math.floor(width / scale / side))
        elif rows * columns * side * side < limits.min_pixels:
            scale = math.sqrt(limits.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
        return Fit((1, rows * side, columns * side), rows * columns)

    def num_tokens(self, size: Size) -> int:
        rows, columns = self._squares(size)
        return rows * columns

    def positions(self, items: Sequence[Item], num_ids: int) -> np.ndarray:
        positions = np.empty((3, num_ids), np.int64)
        done = offset = 0  # of the next id: its index is ``done``, its position ``done + offset``
        first = 0  # the position of the last item, or of its video's first one
        for number, item in enumerate(items):
            positions[:, done : item.start] = np.arange(done, item.start) + offset
            rows, columns = self._squares(item.size)
            if number == 0 or not item.follows(items[number - 1]):
                first = item.start + offset
            where = np.indices((1, rows, columns)).reshape(3, -1) + first
            where[0] += item.time
            positions[:, item.start : item.end] = where
            done = item.end
            offset = first + max(rows, columns) - done
        positions[:, done:] = np.arange(done, num_ids) + offset
        return positions

    def _squares(self, size: Size) -> tuple[int, int]:
        """Raises ValueError."""
        frames, height, width = size
        if self.videos is not None and frames == self.videos.group:
            frames = 1
        return squares_of((frames, height, width), self.side)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), _Config)
        path, given = read_preprocessor_file(folder, _Preprocessor)
        placeholder = config.im_patch_id if config.image_token_id is None else config.image_token_id
        if placeholder is None or not given.do_resize:
            raise ConfigError(f"model: {path}: images without image_token_id or do_resize")
        if given.resample != BICUBIC:
            raise ConfigError(f"model: {path}: resample is {given.resample}; only {BICUBIC} works")
        size = given.size or {}
        limits = PixelLimits(
            given.min_pixels or size.get("shortest_edge") or cls.default_limits.min_pixels,
            given.max_pixels or size.get("longest_edge") or cls.default_limits.max_pixels,
        )
        return cls(placeholder, given.patch_size, given.merge_size, limits)


class _Vision(msgspec.Struct):
    tokens_per_second: float = 4.0


class _VideoConfig(msgspec.Struct):
    video_token_id: int | None = None
    vision_config: _Vision = msgspec.field(default_factory=_Vision)


class SquaresInTime(SquaresOfPatches):
    """Images, and videos of frames like them at positions in time."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        made = super().read(folder)
        config = decode_json(find_file(folder, CONFIG_FILE), _VideoConfig)
        if config.video_token_id is not None:
            limits = read_limits(folder, VideoLimits(128 * 28 * 28, 768 * 28 * 28))
            speed = config.vision_config.tokens_per_second
            made.videos = PairsInTime(config.video_token_id, limits, made.fit, speed)
            made.kinds = ("image", "video")
        return made


NUM_FRAMES = 2  # of an image, in the areas of a file


class RepeatedSquares(SquaresOfPatches):
    """Of GLM. Images with a side shorter than a token are enlarged first."""

    default_limits: ClassVar = PixelLimits(112 * 112, 28 * 28 * 15000)
    options: tuple[str, ...] = ("min_pixels", "max_pixels")

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        if min(width, height) < self.side:
            scale = max(self.side / height, self.side / width)
            width, height = int(width * scale), int(height * scale)
        return super().fit(width, height, limits)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        made = super().read(folder)
        least, most = made.limits[:2]
        made.limits = PixelLimits(least // NUM_FRAMES, most // NUM_FRAMES)
        return made


class RaisedSquares(SquaresOfPatches):
    """Of PaddleOCR-VL. Sides shorter than a token are raised to one before an image is scaled."""

    default_limits: ClassVar = PixelLimits(384 * 384, 1536 * 1536)

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        if height < self.side:
            width, height = round(width * self.side / height), self.side
        if width < self.side:
            width, height = self.side, round(height * self.side / width)
        return super().fit(width, height, limits)
