"""Images of Gemma 3 (arXiv 2503.19786): all of one size, and parts of wide and high ones in that
size too ("pan and scan"). Pure."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import msgspec

from shared.errors import ConfigError
from shared.media.family import (
    MAX_CROPS,
    Box,
    Fit,
    Mark,
    PanAndScan,
    PixelLimits,
    check_ratio,
    read_preprocessor_file,
)
from shared.media.llava import CroppedSquare, added_texts
from shared.model_folder import CONFIG_FILE, decode_json, find_file
from shared.wire.messages import MediumKind

BILINEAR = 2  # Pillow's number


class _Size(msgspec.Struct):
    height: int = 224
    width: int = 224


class _Preprocessor(msgspec.Struct):
    """What it leaves out is the processor's."""

    size: _Size = msgspec.field(default_factory=_Size)
    do_resize: bool = True
    resample: int = BILINEAR
    do_pan_and_scan: bool | None = None
    pan_and_scan_min_crop_size: int | None = None
    pan_and_scan_max_num_crops: int | None = None
    pan_and_scan_min_ratio_to_activate: float | None = None

    @property
    def scan(self) -> PanAndScan:
        given = {name: getattr(self, name) for name in PanAndScan._fields}
        return PanAndScan()._replace(
            **{name: each for name, each in given.items() if each is not None}
        )

    def problem(self, side: int) -> str:
        if not self.do_resize or self.resample != BILINEAR:
            return f"images without do_resize or resample {BILINEAR}"
        if not self.size.height == self.size.width == side:
            return (
                f"size is {self.size.height} x {self.size.width}; the tower takes {side} x {side}"
            )
        scan = self.scan
        if scan.pan_and_scan_min_crop_size < 1:
            return f"pan_and_scan_min_crop_size is {scan.pan_and_scan_min_crop_size}, below 1"
        if not 1 <= scan.pan_and_scan_max_num_crops <= MAX_CROPS:
            return (
                f"pan_and_scan_max_num_crops is {scan.pan_and_scan_max_num_crops}; it may be 1 to"
                f" {MAX_CROPS}"
            )
        return ""


class _Vision(msgspec.Struct):
    image_size: int = 224
    patch_size: int = 16


class Config(msgspec.Struct):
    """config.json"""

    vision_config: _Vision = msgspec.field(default_factory=_Vision)
    mm_tokens_per_image: int = 256
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000
    image_token_index: int = 262_144

    @property
    def merge(self) -> int:
        """The side of a token in patches."""
        patches = self.vision_config.image_size // self.vision_config.patch_size
        return patches // math.isqrt(self.mm_tokens_per_image)

    def problem(self) -> str:
        num, vision = self.mm_tokens_per_image, self.vision_config
        side = math.isqrt(max(num, 0))
        if not side or side * side != num or vision.image_size % (vision.patch_size * side):
            return (
                f"mm_tokens_per_image {num} is no square that divides {vision.image_size} pixels"
                f" in patches of {vision.patch_size}"
            )
        return ""


class StretchedSquare(CroppedSquare):
    """Every image is scaled to ``side`` × ``side`` pixels. Its ``num_tokens`` see each other, and
    stand between ``texts``, which are of the start, a token, and the end."""

    are_whole = True
    options: tuple[str, ...] = PanAndScan._fields

    def __init__(
        self, placeholder: int, num_tokens: int, side: int, texts: list[str], scan: PanAndScan
    ) -> None:
        super().__init__(placeholder, num_tokens, side, side)
        self.limits = self.limits._replace(scan=scan)
        start, token, end = texts
        self.marks: Mapping[MediumKind, Mark] = {
            "image": Mark(start, f"\n\n{start}{token}{end}\n\n")
        }
        self.between = f"{end}\n\n \n\n{start}"
        self.before_crops = "Here is the original image "
        self.behind_first = f"{end}\n\n and here are some crops to help you see better \n\n{start}"

    def fit(self, width: int, height: int, limits: PixelLimits) -> Fit:
        check_ratio(width, height)
        scan = limits.scan if limits.has_parts else None
        boxes = () if scan is None else crops_of(width, height, scan)
        return Fit(self._size, self._num_tokens, resample=BILINEAR, boxes=boxes)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), Config)
        path, given = read_preprocessor_file(folder, _Preprocessor)
        side = config.vision_config.image_size
        for place, problem in (
            (folder / CONFIG_FILE, config.problem()),
            (path, given.problem(side)),
        ):
            if problem:
                raise ConfigError(f"model: {place}: {problem}")
        token = config.image_token_index
        texts = added_texts(folder, config.boi_token_index, token, config.eoi_token_index)
        return cls(token, config.mm_tokens_per_image, side, texts, given.scan)


def crops_of(width: int, height: int, scan: PanAndScan) -> tuple[Box, ...]:
    """The parts of an image that follow it, in a row or in a column."""
    longest, shortest = max(width, height), min(width, height)
    least = scan.pan_and_scan_min_crop_size
    if not scan.do_pan_and_scan:
        return ()
    if longest / shortest < scan.pan_and_scan_min_ratio_to_activate:
        return ()
    num = min(longest // least, math.floor(longest / shortest + 0.5))
    num = min(scan.pan_and_scan_max_num_crops, max(2, num))
    length = math.ceil(longest / num)
    if min(length, shortest) < least:
        return ()
    starts = range(0, longest, length)
    if width >= height:
        return tuple((start, 0, min(start + length, width), height) for start in starts)
    return tuple((0, start, width, min(start + length, height)) for start in starts)
