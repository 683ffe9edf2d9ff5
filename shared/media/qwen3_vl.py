"""Images and videos of Qwen3-VL (arXiv 2511.21631) and Qwen3.5. Pure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.media.family import Film, Fit, VideoLimits, check_ratio
from shared.media.qwen2_5_vl import SquaresOfPatches
from shared.media.video import check_film
from shared.media.video_file import read_limits
from shared.model_folder import CONFIG_FILE, decode_json, find_file


class _Vision(msgspec.Struct):
    depth: int = 27
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def problem(self) -> str:
        deep = self.deepstack_visual_indexes
        if len({*deep}) == len(deep) and all(0 <= each < self.depth for each in deep):
            return ""
        return (
            f"deepstack_visual_indexes {[*deep]} must be different layers of the tower, 0 to"
            f" {self.depth - 1}"
        )


class _Config(msgspec.Struct):
    vision_config: _Vision = msgspec.field(default_factory=_Vision)
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None


class LabelledPairs:
    """Two frames make each item, with the text of their time before it. Areas are of all
    frames together."""

    options: tuple[str, ...] = ("min_pixels", "max_pixels", "size", "fps", "num_frames")
    group = 2
    num_in_tower = 1
    font = ""

    def __init__(
        self,
        placeholder: int,
        around: tuple[tuple[int, ...], tuple[int, ...]],
        limits: VideoLimits,
        side: int,
    ) -> None:
        self.placeholder = placeholder
        self.around = around
        self.limits = limits
        self.most_pixels = limits.max_pixels // self.group
        self._side = side

    def frames(self, film: Film, limits: VideoLimits) -> np.ndarray:
        check_film(film, self.group)
        total, num = film.num_frames, limits.num_frames
        if num is None:
            wanted = max(int(total / film.fps * limits.fps), limits.min_frames)
            num = min(wanted, limits.max_frames, total)
        chosen: np.ndarray = np.linspace(0, total - 1, num).round().astype(np.int64)
        return chosen

    def fit(self, film: Film, num_frames: int, limits: VideoLimits) -> Fit:
        height, width, side, group = film.height, film.width, self._side, self.group
        if num_frames < group:
            raise ValueError(f"has {num_frames} chosen frames; the model takes {group} or more")
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        check_ratio(width, height)
        rows, columns = round(height / side), round(width / side)
        area = round(num_frames / group) * group * rows * columns * side * side
        if area > limits.max_pixels:
            scale = math.sqrt(num_frames * height * width / limits.max_pixels)
            rows = max(1, math.floor(height / scale / side))
            columns = max(1, math.floor(width / scale / side))
        elif area < limits.min_pixels:
            scale = math.sqrt(limits.min_pixels / (num_frames * height * width))
            rows, columns = math.ceil(height * scale / side), math.ceil(width * scale / side)
        return Fit((group, rows * side, columns * side), rows * columns)

    def times(self, film: Film, frames: np.ndarray, num_tokens: int) -> Sequence[int]:
        return [0] * -(-len(frames) // self.group)

    def labels(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        """The middle of its two frames, of which the last one may be alone."""
        seconds = [frame / film.fps for frame in (*frames.tolist(), int(frames[-1]))]
        pairs = zip(seconds[:-1:2], seconds[1::2], strict=False)
        return [f"<{(first + last) / 2:.1f} seconds>" for first, last in pairs]

    def stamps(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        return ()


class LabelledSquares(SquaresOfPatches):
    """Images, and videos of pairs of frames like them."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        config = decode_json(find_file(folder, CONFIG_FILE), _Config)
        made = super().read(folder)
        start, end = config.vision_start_token_id, config.vision_end_token_id
        if config.video_token_id is not None and start is not None and end is not None:
            limits = read_limits(folder, VideoLimits(128 * 32 * 32, 768 * 32 * 32))
            around = (start,), (end,)
            made.videos = LabelledPairs(config.video_token_id, around, limits, made.side)
            made.kinds = ("image", "video")
        return made


class DeepSquares(LabelledSquares):
    """Inner layers of the tower give features too (DeepStack, arXiv 2406.04334)."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Raises ConfigError."""
        path = find_file(folder, CONFIG_FILE)
        vision = decode_json(path, _Config).vision_config
        if problem := vision.problem():
            raise ConfigError(f"model: {path}: {problem}")
        made = super().read(folder)
        made.num_embeddings = 1 + len(vision.deepstack_visual_indexes)
        return made
