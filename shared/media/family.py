"""The arithmetic of images for one model: sizes, placeholders, positions. Pure, without torch."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.model_folder import decode_json
from shared.wire.messages import Item, MediumKind

PREPROCESSOR_FILE = "preprocessor_config.json"
PROCESSOR_FILE = "processor_config.json"
BICUBIC = 3  # Pillow's number
MAX_CROPS = 64  # of an image, in a file or a request. Chosen
MAX_RATIO = 200  # of the sides of an image
SOFT_TOKENS = 70, 140, 280, 560, 1120  # of an image of Gemma 4

WITH_ARTICLE: dict[MediumKind, str] = {"image": "an image", "video": "a video"}

Size = tuple[int, int, int]  # frames, height, width
Box = tuple[int, int, int, int]  # left, upper, right, lower
T = TypeVar("T")


class PanAndScan(NamedTuple):
    """The parts of a wide or high image that follow it as images of their own."""

    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2


class PixelLimits(NamedTuple):
    """The areas that an image is scaled to. Unless it ``has_parts``, no parts of it are items of
    their own; ``scan`` is for a family that chooses them by it. ``soft_tokens`` are the most of an
    image, in a family that has as many as fit."""

    min_pixels: int
    max_pixels: int
    scan: PanAndScan | None = None
    has_parts: bool = True
    soft_tokens: int | None = None


class Fit(NamedTuple):
    """An image for the model: its ``size`` in pixels and its number of tokens. It may be the middle
    of an image that is ``scaled`` to a width and height. If it ``is_tiled``, its frames are the
    tiles of that image, row by row, and after several the whole image in the size of a tile. Its
    parts in ``boxes`` are scaled to the same size. ``resample`` is Pillow's number."""

    size: Size
    num_tokens: int
    scaled: tuple[int, int] | None = None
    is_tiled: bool = False
    resample: int = BICUBIC
    boxes: tuple[Box, ...] = ()


class VideoLimits(NamedTuple):
    """The areas that frames are scaled to, and the choice of frames: ``num_frames`` of them, or
    ``fps`` for each second, ``min_frames`` to ``max_frames`` of them."""

    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    listed_fps: float = 24.0  # of frames that come one by one, as in transformers


class Film(NamedTuple):
    """A video file before its frames are chosen."""

    width: int
    height: int
    num_frames: int
    fps: float


class Videos(Protocol):
    """The videos of a family. ``group`` frames at a time are an item of a prompt, and
    ``placeholder`` is the id of each of its features; other ids are ``around`` these. ``options``
    are the names that settings and requests may give. No frame has more than ``most_pixels``, and
    ``num_in_tower`` frames of a group have patches of their own there. Stamps are drawn in the
    file ``font``, if it exists."""

    placeholder: int
    limits: VideoLimits
    options: tuple[str, ...]
    group: int
    around: tuple[tuple[int, ...], tuple[int, ...]]
    most_pixels: int
    num_in_tower: int
    font: str

    def frames(self, film: Film, limits: VideoLimits) -> np.ndarray:
        """The numbers [n] int64 of the frames to decode. Raises ValueError."""

    def fit(self, film: Film, num_frames: int, limits: VideoLimits) -> Fit:
        """A group of ``num_frames`` frames. Raises ValueError."""

    def times(self, film: Film, frames: np.ndarray, num_tokens: int) -> Sequence[int]:
        """How far each group is from the first one in positions of time; a group has
        ``num_tokens``. Raises ValueError for times that the model cannot tell apart from ones of
        later tokens."""

    def labels(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        """The text before each group."""

    def stamps(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        """The text that is drawn on each frame; none for frames that stay as they are."""


class Mark(NamedTuple):
    """The text ``marker`` of a chat template, and the text ``written`` in its place."""

    marker: str
    written: str


@runtime_checkable
class Marked(Protocol):
    """A family whose chat template writes a marker for an image or a video. The text in its place
    has one placeholder. An image with parts is written ``before_crops`` too, and its parts follow
    it ``behind_first``, ``between`` each other."""

    marks: Mapping[MediumKind, Mark]
    before_crops: str
    behind_first: str
    between: str


class Family(Protocol):
    """``placeholder`` is the id of each feature of an item in a prompt; a chat template writes it
    once, unless the family is ``Marked``. Tokens of an item see each other if they ``are_whole``:
    then one step computes them. ``limits`` are the defaults; settings and requests give lower
    values of ``max_pixels`` only, as workers reserve memory for an image of that area. ``options``
    are the names that they may give. A feature has ``num_embeddings``: one takes the place of the
    token's own, the others are added behind the first layers. In a prompt, experts of images serve
    the tokens of ``image_ids``, if there are some. A model that looks ids up again finds the one
    of ``filler`` in place of features. Most families have the values here."""

    kinds: tuple[MediumKind, ...] = ("image",)
    videos: Videos | None = None
    placeholder: int
    limits: PixelLimits
    options: tuple[str, ...] = ()
    num_embeddings: int = 1
    image_ids: tuple[int, ...] = ()
    filler: int | None = None
    are_whole: bool = False

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        """Raises ValueError for an image that the model does not take."""

    def num_tokens(self, size: Size) -> int:
        """Raises ValueError for a size that ``fit`` never gives."""

    def ids(self, size: Size) -> np.ndarray:
        """The ids [num_tokens] int32 of an image in a prompt, from the first placeholder on. Other
        ids among them are texts. Videos have placeholders alone."""
        return np.full(self.num_tokens(size), self.placeholder, np.int32)

    def positions(self, items: Sequence[Item], num_ids: int) -> np.ndarray:
        """The positions [axes, num_ids] int64 of a prompt whose ids hold ``items`` in order, with
        one axis or three (time, row, column). Behind a prompt every axis goes on from the last
        one's largest plus one."""
        return np.arange(num_ids)[None]


def placeholders_of(family: Family) -> dict[MediumKind, int]:
    found: dict[MediumKind, int] = {"image": family.placeholder}
    return found if family.videos is None else found | {"video": family.videos.placeholder}


def limits_of(family: Family) -> dict[MediumKind, PixelLimits | VideoLimits]:
    found: dict[MediumKind, PixelLimits | VideoLimits] = {"image": family.limits}
    return found if family.videos is None else found | {"video": family.videos.limits}


def options_of(family: Family) -> tuple[str, ...]:
    return family.options if family.videos is None else family.videos.options


def check_ratio(width: int, height: int) -> None:
    """Raises ValueError."""
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(
            f"is {width} x {height} pixels; one side may be {MAX_RATIO} times the other"
        )


def squares_of(size: Size, side: int) -> tuple[int, int]:
    """The rows and columns of squares in an image. Raises ValueError if they leave a rest."""
    frames, height, width = size
    if frames != 1 or height % side or width % side:
        raise ValueError(f"no image of the model has the size {size}")
    return height // side, width // side


class _Processor(msgspec.Struct):
    image_processor: dict[str, Any] | None = None


def describes_images(folder: Path) -> bool:
    """Raises ConfigError."""
    return _nested(folder) is not None or (folder / PREPROCESSOR_FILE).is_file()


def read_preprocessor_file(folder: Path, kind: type[T]) -> tuple[Path, T]:
    """The file that describes images and the description, a part of the processor's file if that
    has one. Raises ConfigError."""
    nested = _nested(folder)
    path = folder / (PREPROCESSOR_FILE if nested is None else PROCESSOR_FILE)
    if nested is None:
        return path, decode_json(path, kind)
    try:
        return path, msgspec.convert(nested, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}") from None


def _nested(folder: Path) -> dict[str, Any] | None:
    path = folder / PROCESSOR_FILE
    return decode_json(path, _Processor).image_processor if path.is_file() else None


def digest_of(kind: MediumKind, size: Size, pixels: memoryview, salt: str, time: int = 0) -> bytes:
    """The name of an item, among requests with the same ``salt``: equal input has equal names."""
    digest = blake2b(msgspec.msgpack.encode((kind, size, salt, time)), digest_size=16)
    digest.update(pixels)
    return digest.digest()
