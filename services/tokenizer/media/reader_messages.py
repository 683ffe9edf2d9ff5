"""Messages between a tokenizer and a process that reads images and videos.

They are framed as in ``shared/child_process/child.py``. Files and pixels go through a file in
memory that both have. A process says that it is ready by an Answer. Then it gets a File and answers
with the size of the image; it gets Targets, or an empty message for a file that is not wanted, and
answers Targets with the size that it has put into memory. An ``error`` ends the file.
"""

import os
from math import prod

import msgspec

from shared.media.family import BICUBIC, Box
from shared.wire.messages import MediumKind

NO_VIEW = 0, 0


class File(msgspec.Struct, array_like=True):
    """``num_bytes`` are in memory. A process that computes longer than ``max_cpu_s`` ends."""

    num_bytes: int
    kind: MediumKind
    max_cpu_s: float


class Targets(msgspec.Struct, array_like=True):
    """The width and height to scale an image to, as it is stored, and if it is turned by a
    quarter. Then the middle of the size ``crop`` is cut out, or the image is cut into tiles of the
    size ``tile``, row by row; the whole image follows, in one of the sizes ``views``, or in that of
    a tile if there are several. Or its parts in ``boxes`` follow it in its size, of an image that
    is turned those in ``turned_boxes``. Of a video these ``frames`` are wanted, in ascending order.
    If there are ``stamps``, each of them is drawn on a frame in the file ``font`` first.
    ``resample`` is Pillow's number."""

    upright: tuple[int, int]
    turned: tuple[int, int]
    crop: tuple[int, int] | None = None
    frames: list[int] | None = None
    tile: tuple[int, int] | None = None
    stamps: list[str] = []
    font: str = ""
    views: list[tuple[int, int]] = []
    resample: int = BICUBIC
    boxes: list[Box] = []
    turned_boxes: list[Box] = []

    @property
    def made(self) -> list[tuple[int, int, int]]:
        """The widths and heights that frames may have, and their numbers."""
        if self.tile is not None:
            num_tiles = (prod(each) // prod(self.tile) for each in (self.upright, self.turned))
            return [(*self.tile, num + (num > 1 and not self.views)) for num in num_tiles]
        sizes = [self.upright, self.turned] if self.crop is None else [self.crop]
        num = 1 + len(self.boxes) if self.frames is None else len(self.frames)
        return [(*size, num) for size in sizes]


class Answer(msgspec.Struct, array_like=True):
    """A video has ``num_frames``, and ``fps`` of them a second unless they came one by one. Pixels
    are ``num_frames`` of a size, and one of the size ``view`` if it is none. ``is_turned`` tells of
    an image that it was turned by a quarter."""

    width: int = 0
    height: int = 0
    error: str = ""
    num_frames: int = 1
    fps: float = 0.0
    view: tuple[int, int] = NO_VIEW
    is_turned: bool = False

    @property
    def num_bytes(self) -> int:
        """Of its pixels."""
        return 3 * (self.num_frames * self.width * self.height + prod(self.view))


def put(fd: int, data: memoryview, place: int = 0) -> None:
    """Replaces the content of the file in memory from ``place`` on."""
    os.ftruncate(fd, place)
    num_bytes = 0
    while num_bytes < len(data):
        num_bytes += os.pwrite(fd, data[num_bytes:], place + num_bytes)


def take(fd: int, data: memoryview) -> None:
    """Fills ``data`` from the file in memory, which is then empty. Raises EOFError if that holds
    less."""
    num_bytes = 0
    while num_bytes < len(data):
        num = os.preadv(fd, [data[num_bytes:]], num_bytes)
        if not num:
            raise EOFError
        num_bytes += num
    os.ftruncate(fd, 0)
