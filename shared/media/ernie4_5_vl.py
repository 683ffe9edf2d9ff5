"""Images and videos of ERNIE-4.5-VL (technical report of June 2025). Pure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.media.family import Film, Fit, PixelLimits, VideoLimits
from shared.media.qwen2_5_vl import SquaresOfPatches
from shared.media.video import FitImage, Pairs, check_film, spread
from shared.media.video_file import COMMON, find_file_of_videos, limits_in
from shared.model_folder import CONFIG_FILE, decode_json, find_file

PUBLISHED = "ernie4_5_moe_vl"  # the model_type in files that are not transformers'
FONT = "Roboto-Regular.ttf"
AREAS = 299 * 28 * 28, 1196 * 28 * 28  # of a frame
LEAST_SIDE = 10  # of a frame with a time on it
EVERY_FRAME = math.inf  # of a second
OF_FRAMES = tuple(name for name in COMMON if name != "temporal_patch_size")  # 1 of images


class _Config(msgspec.Struct):
    """The published ids, which its files often leave out."""

    image_start_token_id: int = 101304
    image_end_token_id: int = 101305
    video_start_token_id: int = 101306
    video_end_token_id: int = 101307
    video_token_id: int = 103367
    model_type: str = ""

    @property
    def around(self) -> tuple[int, ...]:
        images = self.image_start_token_id, self.image_end_token_id
        return *images, self.video_start_token_id, self.video_end_token_id


class _Stamps(msgspec.Struct):
    draw_on_frames: bool = True
    font: str | None = None


class StampedPairs(Pairs):
    """Items follow each other in time. Frames have their times drawn on them, unless ``font`` is
    empty, and patches of their own."""

    num_in_tower = Pairs.group

    def __init__(self, placeholder: int, fit: FitImage, limits: VideoLimits, font: str) -> None:
        super().__init__(placeholder, limits, fit)
        self.font = font

    def frames(self, film: Film, limits: VideoLimits) -> np.ndarray:
        check_film(film, 1)
        total, least, most = film.num_frames, limits.min_frames, limits.max_frames
        num = limits.num_frames
        if num is None:
            return spread(min(max(total / film.fps * limits.fps, least), most, total), total)
        if not least <= num <= min(most, total):
            raise ValueError(
                f"has {total} frames; num_frames is {num}, and the model takes {least} to {most}"
            )
        return spread(num, total)

    def fit(self, film: Film, num_frames: int, limits: VideoLimits) -> Fit:
        if self.font and min(film.width, film.height) < LEAST_SIDE:
            raise ValueError(
                f"is {film.width} x {film.height} pixels; the model takes videos with sides of"
                f" {LEAST_SIDE} or more"
            )
        return super().fit(film, num_frames, limits)

    def times(self, film: Film, frames: np.ndarray, num_tokens: int) -> Sequence[int]:
        return range(self.num_items(frames))

    def stamps(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        if not self.font:
            return ()
        return [_stamp(each) for each in frames.astype(np.float32) / np.float32(film.fps)]


def _stamp(seconds: np.float32) -> str:
    whole, rest = divmod(seconds, np.float32(60))
    hours, minutes = divmod(int(whole), 60)
    return f"time: {hours:02d}:{minutes:02d}:{rest:05.2f}"


class ErnieSquares(SquaresOfPatches):
    """Experts of images serve the tokens of an image or a video and the ids around it."""

    default_limits: ClassVar = PixelLimits(56 * 56, 28 * 28 * 6177)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        made = super().read(folder)
        config = decode_json(find_file(folder, CONFIG_FILE), _Config)
        # Published tokenizers have no placeholder of videos.
        is_published = config.model_type == PUBLISHED
        placeholder = made.placeholder if is_published else config.video_token_id
        made.videos = StampedPairs(placeholder, made.fit, *_read_videos(folder))
        made.kinds = ("image", "video")
        made.image_ids = *{made.placeholder, placeholder}, *config.around
        return made


def _read_videos(folder: Path) -> tuple[VideoLimits, str]:
    """The limits, and the file of the font. Raises ConfigError."""
    found = find_file_of_videos(folder)
    if found is None:
        return VideoLimits(*AREAS, min_frames=16, max_frames=180), str(folder / FONT)
    path, content = found
    defaults = VideoLimits(*AREAS, EVERY_FRAME, min_frames=16, max_frames=180)
    limits = limits_in(path, content, defaults, OF_FRAMES)
    try:
        given = msgspec.convert(content, _Stamps)
    except msgspec.ValidationError as error:
        raise ConfigError(f"model: {path}: {error}") from None
    name = Path(given.font or FONT).name
    return limits, str(folder / name) if given.draw_on_frames else ""
