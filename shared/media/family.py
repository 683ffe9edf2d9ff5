"""The arithmetic of images for one model: sizes, placeholders, positions. Pure, without torch."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from shared.wire.messages import Item, MediumKind

PREPROCESSOR_FILE = "preprocessor_config.json"
BICUBIC = 3  # Pillow's number
MAX_RATIO = 200  # of the sides of an image

Size = tuple[int, int, int]  # frames, height, width


class PixelLimits(NamedTuple):
    """The areas that an image is scaled to."""

    min_pixels: int
    max_pixels: int


class Fit(NamedTuple):
    """An image for the model: its ``size`` in pixels and its number of tokens. It may be the middle
    of an image that is ``scaled`` to a width and height."""

    size: Size
    num_tokens: int
    scaled: tuple[int, int] | None = None


class Family(Protocol):
    """``placeholder`` is the id of each feature of an item in a prompt; a chat template writes it
    once. ``limits`` are the defaults; settings and requests give lower values of ``max_pixels``
    only, as workers reserve memory for an image of that area. ``options`` are the names that they
    may give. A feature has ``num_embeddings``: one takes the place of the token's own, the others
    are added behind the first layers. In a prompt, experts of images serve the tokens of
    ``image_ids``, if there are some."""

    kinds: tuple[MediumKind, ...]
    placeholder: int
    limits: PixelLimits
    options: tuple[str, ...]
    num_embeddings: int
    image_ids: tuple[int, ...]

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        """Raises ValueError for an image that the model does not take."""

    def num_tokens(self, size: Size) -> int:
        """Raises ValueError for a size that ``fit`` never gives."""

    def ids(self, size: Size) -> np.ndarray:
        """The ids [num_tokens] int32 of an item in a prompt, from the first placeholder on. Other
        ids among them are texts."""

    def positions(self, items: Sequence[Item], num_ids: int) -> np.ndarray:
        """The positions [axes, num_ids] int64 of a prompt whose ids hold ``items`` in order, with
        one axis or three (time, row, column). Behind a prompt every axis goes on from the last
        one's largest plus one."""


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


def digest_of(kind: MediumKind, size: Size, pixels: memoryview, salt: str) -> bytes:
    """Names what the model sees of an item, among requests with the same ``salt``."""
    digest = blake2b(msgspec.msgpack.encode((kind, size, salt)), digest_size=16)
    digest.update(pixels)
    return digest.digest()
