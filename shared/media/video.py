"""The arithmetic of videos: frames, their sizes and times. Pure."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from shared.media.family import Film, Fit, PixelLimits, VideoLimits

MAX_FPS = 1000.0

FitImage = Callable[[int, int, PixelLimits], Fit]  # of a width and height


def check_film(film: Film, least: int) -> None:
    """Raises ValueError for a film with fewer frames than ``least``, or without times."""
    if film.num_frames < least:
        raise ValueError(f"has {film.num_frames} frames; the model takes {least} or more")
    if not 0 < film.fps <= MAX_FPS:
        raise ValueError(f"has {film.fps:g} frames a second; the limit is {MAX_FPS:g}")


def sampled_fps(film: Film, num_frames: int) -> float:
    """Of the chosen frames."""
    return num_frames / film.num_frames * film.fps


def spread(num: float, total: int) -> np.ndarray:
    """The numbers of ``num`` of ``total`` frames at equal distances, from the first one on."""
    step = total / num
    # As torch.arange does, whose result may have one more, behind the last frame.
    places = np.arange(min(math.ceil(num), math.ceil(total / step))) * step
    chosen: np.ndarray = np.minimum(places.astype(np.float32).astype(np.int64), total - 1)
    return chosen


class Pairs:
    """Two frames make each item. Other text is not around these, nor on them."""

    options: tuple[str, ...] = ("min_pixels", "max_pixels", "size", "fps", "num_frames")
    group = 2
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    num_in_tower = 1
    font = ""

    def __init__(self, placeholder: int, limits: VideoLimits, fit: FitImage) -> None:
        self.placeholder = placeholder
        self.limits = limits
        self._fit = fit
        self.most_pixels = limits.max_pixels

    def fit(self, film: Film, num_frames: int, limits: VideoLimits) -> Fit:
        found = self._fit(film.width, film.height, PixelLimits(*limits[:2]))
        _, height, width = found.size
        return Fit((self.group, height, width), found.num_tokens)

    def labels(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        return [""] * self.num_items(frames)

    def stamps(self, film: Film, frames: np.ndarray) -> Sequence[str]:
        return ()

    def num_items(self, frames: np.ndarray) -> int:
        return -(-len(frames) // self.group)


class PairsInTime(Pairs):
    """Qwen2.5-VL's: the time of an item is the one of its first frame."""

    def __init__(
        self, placeholder: int, limits: VideoLimits, fit: FitImage, tokens_per_second: float
    ) -> None:
        super().__init__(placeholder, limits, fit)
        self._tokens_per_second = tokens_per_second

    def frames(self, film: Film, limits: VideoLimits) -> np.ndarray:
        check_film(film, self.group)
        total, group = film.num_frames, self.group
        if limits.num_frames is not None:
            num = round(limits.num_frames / group) * group
        else:
            most = min(limits.max_frames, total) // group * group
            wanted = max(total / film.fps * limits.fps, limits.min_frames)
            num = math.floor(min(wanted, most, total) / group) * group
        if not group <= num <= total:
            raise ValueError(
                f"has {total} frames, {film.fps:g} a second; {num} of them are wanted (num_frames,"
                f" fps), at least {group} are needed"
            )
        return spread(num, total)

    def times(self, film: Film, frames: np.ndarray, num_tokens: int) -> Sequence[int]:
        num = self.num_items(frames)
        seconds = np.float32(self.group / sampled_fps(film, len(frames)))
        interval = np.float32(self._tokens_per_second) * seconds
        if num > 1 and interval > num_tokens:
            raise ValueError(
                f"has {seconds:g} s between items of {num_tokens} tokens, which are"
                f" {interval:g} positions; more frames (fps) or pixels (min_pixels) are needed"
            )
        times: list[int] = (np.arange(num, dtype=np.float32) * interval).astype(int).tolist()
        return times
