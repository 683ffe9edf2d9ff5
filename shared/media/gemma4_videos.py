"""Videos of Gemma 4: frames as images, with the text of its time before each. Pure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.media.family import (
    SOFT_TOKENS,
    Film,
    Fit,
    PixelLimits,
    VideoLimits,
    read_preprocessor_file,
)
from shared.media.video import FitImage, check_film
from shared.media.video_file import find_file_of_videos, limits_in
from shared.wire.messages import MAX_MEDIA

NUM_FRAMES = 32
# As of images, by which workers compute frames.
COMMON = ("patch_size", "pooling_kernel_size", "rescale_factor", "do_rescale")
SAME = {"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}  # the values of pixels stay


class _Videos(msgspec.Struct):
    """What it leaves out is the processor's."""

    max_soft_tokens: int = SOFT_TOKENS[0]
    fps: float | None = None


class LabelledFrames:
    """Each frame is an item, between the texts ``around`` it. Its time stands before it."""

    options: tuple[str, ...] = ("max_soft_tokens", "fps", "num_frames")
    group = 1
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    num_in_tower = 1
    font = ""

    def __init__(
        self, placeholder: int, around: tuple[str, str], limits: VideoLimits, fit: FitImage
    ) -> None:
        self.placeholder = placeholder
        self.limits = limits
        self.most_pixels = limits.max_pixels
        self._start, self._end = around
        self._fit = fit

    def written(self, placeholder: str) -> str:
        """A video in a text: its first frame, which is that of the time 0."""
        return f"{_time(0)} {self._start}{placeholder}{self._end}"

    def frames(self, film: Film, limits: VideoLimits) -> np.ndarray:
        check_film(film, 1)
        total, num = film.num_frames, limits.num_frames
        if num is None:
            num = max(1, int(min(total, total / film.fps * limits.fps)))
        num = min(num, total)
        if num > MAX_MEDIA:
            raise ValueError(f"has {num} chosen frames (num_frames, fps); the limit is {MAX_MEDIA}")
        chosen: np.ndarray = np.arange(num) * total // num
        return chosen

    def fit(self, film: Film, num_frames: int, limits: VideoLimits) -> Fit:
        most = PixelLimits(1, limits.max_pixels, soft_tokens=SOFT_TOKENS[-1])
        return self._fit(film.width, film.height, most)

    def times(self, film: Film, frames: np.ndarray, num_tokens: int) -> Sequence[int]:
        return [0] * len(frames)

    def labels(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        """The first one is ``written``."""
        times = (_time(frame / film.fps) for frame in frames[1:].tolist())
        return ["", *(f"{self._end} {time} {self._start}" for time in times)]

    def stamps(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        return ()


def _time(seconds: float) -> str:
    return f"{int(seconds // 60):02d}:{int(seconds % 60):02d}"


def read_video_limits(folder: Path, side: int) -> VideoLimits:
    """Of frames whose tokens are ``side`` × ``side`` pixels. Raises ConfigError."""
    path, found = find_file_of_videos(folder) or read_preprocessor_file(folder, dict[str, Any])
    normalizes = found.get("do_normalize", True)
    for name, value in SAME.items() if normalizes else ():
        if found.get(name, value) != value:
            raise ConfigError(f"model: {path}: {name} is {found[name]}; only {value} is supported")
    try:
        given = msgspec.convert(found, _Videos)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}") from None
    if given.max_soft_tokens not in SOFT_TOKENS:
        raise ConfigError(
            f"model: {path}: max_soft_tokens is {given.max_soft_tokens}; it may be one of"
            f" {SOFT_TOKENS}"
        )
    most = given.max_soft_tokens * side * side
    num = None if given.fps else NUM_FRAMES
    return limits_in(path, found, VideoLimits(1, most, num_frames=num), COMMON)
