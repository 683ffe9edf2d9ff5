"""Images of LLaVA 1.5 (arXiv 2310.03744). Pure."""

from pathlib import Path
from typing import Self

import msgspec

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
from shared.model_folder import CONFIG_FILE, TOKENIZER_FILE, decode_json, find_file


class _Shortest(msgspec.Struct):
    shortest_edge: int = 0


class _Crop(msgspec.Struct):
    height: int = 0
    width: int = 0


class _Preprocessor(msgspec.Struct):
    size: _Shortest
    crop_size: _Crop
    do_resize: bool = True
    do_center_crop: bool = True
    resample: int = BICUBIC

    def problem(self, side: int) -> str:
        if not self.do_resize or not self.do_center_crop or self.resample != BICUBIC:
            return f"images without do_resize, do_center_crop or resample {BICUBIC}"
        crop = self.crop_size
        if not crop.height == crop.width == side <= self.size.shortest_edge:
            return (
                f"crop_size is {crop.height} x {crop.width} of an image with the shortest_edge"
                f" {self.size.shortest_edge}; the tower takes {side} x {side}"
            )
        return ""


class _Vision(msgspec.Struct):
    image_size: int
    patch_size: int


class Placeholder(msgspec.Struct):
    """The id of a feature in config.json."""

    image_token_id: int | None = None
    image_token_index: int | None = None

    def find(self, folder: Path) -> int:
        """Raises ConfigError."""
        for found in (self.image_token_id, self.image_token_index):
            if found is not None:
                return found
        raise ConfigError(f"model: {folder / CONFIG_FILE}: images without image_token_index")


class _Added(msgspec.Struct):
    content: str
    id: int


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Added] = []


def added_ids(folder: Path, *names: str) -> list[int]:
    """The ids of added tokens. Raises ConfigError."""
    tokens = decode_json(find_file(folder, TOKENIZER_FILE), _Tokenizer).added_tokens
    ids = {each.content: each.id for each in tokens}
    for name in names:
        if name not in ids:
            raise ConfigError(f"model: {folder / TOKENIZER_FILE} has no added token {name}")
    return [ids[name] for name in names]


def all_added(folder: Path) -> dict[int, str]:
    """The texts of all added tokens, by id. Raises ConfigError."""
    tokens = decode_json(find_file(folder, TOKENIZER_FILE), _Tokenizer).added_tokens
    return {each.id: each.content for each in tokens}


def added_texts(folder: Path, *ids: int) -> list[str]:
    """The texts of added tokens. Raises ConfigError."""
    texts = all_added(folder)
    for each in ids:
        if each not in texts:
            raise ConfigError(f"model: {folder / TOKENIZER_FILE} has no added token {each}")
    return [texts[each] for each in ids]


class Config(Placeholder, kw_only=True):
    """config.json"""

    vision_config: _Vision
    vision_feature_select_strategy: str = "default"


class CroppedSquare(Family):
    """The middle of every image, ``side`` × ``side`` pixels, once its shortest side has
    ``shortest``."""

    def __init__(self, placeholder: int, num_tokens: int, side: int, shortest: int) -> None:
        self.placeholder = placeholder
        self.limits = PixelLimits(side * side, side * side)
        self._num_tokens = num_tokens
        self._size = 1, side, side
        self._shortest = shortest

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        shortest, longest = self._shortest, max(width, height)
        other = int(shortest * longest / min(width, height))
        scaled = (shortest, other) if width <= height else (other, shortest)
        return Fit(self._size, self._num_tokens, scaled)

    def num_tokens(self, size: Size) -> int:
        if size != self._size:
            raise ValueError(f"no image of the model has the size {size}")
        return self._num_tokens

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), Config)
        path, given = read_preprocessor_file(folder, _Preprocessor)
        vision = config.vision_config
        if problem := given.problem(vision.image_size):
            raise ConfigError(f"model: {path}: {problem}")
        num_tokens = (vision.image_size // vision.patch_size) ** 2
        if config.vision_feature_select_strategy == "full":  # with the token of the class
            num_tokens += 1
        placeholder, shortest = config.find(folder), given.size.shortest_edge
        return cls(placeholder, num_tokens, vision.image_size, shortest)
