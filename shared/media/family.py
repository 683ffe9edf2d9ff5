"""The arithmetic of images for one model: sizes, placeholders, positions. Pure, without torch."""

import math
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file
from shared.wire.messages import Item, MediumKind

PREPROCESSOR_FILE = "preprocessor_config.json"
MAX_RATIO = 200  # of the sides of an image

Size = tuple[int, int, int]  # frames, height, width


class PixelLimits(NamedTuple):
    """The areas that an image is scaled to."""

    min_pixels: int
    max_pixels: int


class Fit(NamedTuple):
    """An image for the model: its ``size`` in pixels and its number of tokens."""

    size: Size
    num_tokens: int


class Family(Protocol):
    """``placeholder`` is the id that stands for each token of an item in a prompt; a chat template
    writes it once. ``limits`` are the defaults; settings and requests give lower values of
    ``max_pixels`` only, as workers reserve memory for an image of that area."""

    kinds: tuple[MediumKind, ...]
    placeholder: int
    limits: PixelLimits

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        """Raises ValueError for an image that the model does not take."""

    def num_tokens(self, size: Size) -> int:
        """Raises ValueError for a size that ``fit`` never gives."""

    def positions(self, items: Sequence[Item], num_ids: int) -> np.ndarray:
        """The positions [3, num_ids] int64 (time, row, column) of a prompt whose ids hold ``items``
        in order. Behind a prompt every axis goes on from the last one's largest plus one."""


class _Preprocessor(msgspec.Struct):
    """``size`` holds areas too."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    size: dict[str, Any] | None = None
    patch_size: int = 14
    merge_size: int = 2
    do_resize: bool = True


class _Config(msgspec.Struct):
    architectures: list[str] = []
    image_token_id: int | None = None


class SquaresOfPatches:
    """Qwen2.5-VL (arXiv 2502.13923): a token for each square of ``merge`` × ``merge`` patches of
    ``patch`` × ``patch`` pixels, at the square's row and column."""

    kinds: tuple[MediumKind, ...] = ("image",)

    def __init__(self, placeholder: int, patch: int, merge: int, limits: PixelLimits) -> None:
        self.placeholder = placeholder
        self.limits = limits
        self._side = patch * merge

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        side = self._side
        if max(width, height) > MAX_RATIO * min(width, height):
            raise ValueError(
                f"is {width} x {height} pixels; one side may be {MAX_RATIO} times the other"
            )
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
        for item in items:
            positions[:, done : item.start] = np.arange(done, item.start) + offset
            rows, columns = self._squares(item.size)
            first = item.start + offset
            where = np.indices((1, rows, columns)).reshape(3, -1) + first
            positions[:, item.start : item.end] = where
            done = item.end
            offset = first + max(rows, columns) - done
        positions[:, done:] = np.arange(done, num_ids) + offset
        return positions

    def _squares(self, size: Size) -> tuple[int, int]:
        frames, height, width = size
        if frames != 1 or height % self._side or width % self._side:
            raise ValueError(f"no image of the model has the size {size}")
        return height // self._side, width // self._side


QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"


def read_family(folder: Path) -> Family | None:
    """None for a model without images, and for one whose images are not supported. Raises
    ConfigError."""
    config = decode_json(find_file(folder, CONFIG_FILE), _Config)
    if QWEN2_5_VL not in config.architectures or not (folder / PREPROCESSOR_FILE).is_file():
        return None
    path = folder / PREPROCESSOR_FILE
    given = decode_json(path, _Preprocessor)
    if config.image_token_id is None or not given.do_resize:
        raise ConfigError(f"model: {path}: images without image_token_id or do_resize")
    size = given.size or {}
    limits = PixelLimits(
        given.min_pixels or size.get("shortest_edge") or 56 * 56,
        given.max_pixels or size.get("longest_edge") or 28 * 28 * 1280,
    )
    return SquaresOfPatches(config.image_token_id, given.patch_size, given.merge_size, limits)


def digest_of(kind: MediumKind, size: Size, pixels: memoryview, salt: str) -> bytes:
    """Names what the model sees of an item, among requests with the same ``salt``."""
    digest = blake2b(msgspec.msgpack.encode((kind, size, salt)), digest_size=16)
    digest.update(pixels)
    return digest.digest()
