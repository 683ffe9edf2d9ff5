"""Files as a prompt has them: ids, and items of pixels that the model sees."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import zip_longest
from math import prod
from typing import ClassVar, Protocol

import numpy as np

from services.tokenizer.media.placeholders import ReadItem, ReadMedium
from services.tokenizer.media.reader_messages import Answer, Targets
from services.tokenizer.media.readers import Pixels
from shared.media.family import Family, Film, Fit, PixelLimits, Size, VideoLimits, Videos, digest_of
from shared.wire.codec import Array
from shared.wire.messages import MAX_MEDIA, MAX_SIDE, MediumKind

NO_PIXELS = np.zeros(0, np.uint8)
NO_IDS = np.zeros(0, np.int32)


class Fitting(Protocol):
    """One file. It has ``num_tokens`` and ``num_items``, and ``num_bytes`` of pixels once it is
    fitted."""

    kind: ClassVar[MediumKind]
    num_tokens: int
    num_items: int
    num_bytes: int

    @abstractmethod
    def fit(self, found: Answer) -> Targets:
        """Raises ValueError for a file that the model does not take."""

    @abstractmethod
    def medium(self, pixels: Pixels | None, salt: str) -> ReadMedium:
        """Without pixels and digests if ``pixels`` is None."""


class ImageFitting(Fitting):
    kind = "image"
    num_items = 1

    def __init__(self, family: Family, limits: PixelLimits) -> None:
        self._family = family
        self._limits = limits

    def fit(self, found: Answer) -> Targets:
        width, height = found.width, found.height
        upright, turned = (
            self._family.fit(*each, self._limits) for each in ((width, height), (height, width))
        )
        check_sides(upright)
        self._size = upright.size
        self.num_tokens, self.num_bytes = upright.num_tokens, prod(upright.size) * 3
        whole, turned_whole = (fit.scaled or width_and_height(fit) for fit in (upright, turned))
        if upright.is_tiled:
            return Targets(whole, turned_whole, tile=width_and_height(upright))
        crop = None if upright.scaled is None else width_and_height(upright)
        return Targets(
            whole,
            turned_whole,
            crop,
            resample=upright.resample,
            boxes=[*upright.boxes],
            turned_boxes=[*turned.boxes],
        )

    def medium(self, pixels: Pixels | None, salt: str) -> ReadMedium:
        size, data = self._size, NO_PIXELS
        if pixels is not None:
            num_frames = len(pixels.data) // (3 * pixels.height * pixels.width)
            size, data = (num_frames, pixels.height, pixels.width), pixels.data
        ids = self._family.ids(size)
        return ReadMedium(self.kind, ids, (item_of(self.kind, 0, len(ids), size, data, salt),))


class VideoFitting(Fitting):
    """Its frames are chosen, and a group of them is an item."""

    kind = "video"

    def __init__(
        self,
        family: Family,
        videos: Videos,
        limits: VideoLimits,
        encode: Callable[[str], Array],
    ) -> None:
        self._family = family
        self._videos = videos
        self._limits = limits
        self._encode = encode

    def fit(self, found: Answer) -> Targets:
        videos, limits = self._videos, self._limits
        film = Film(found.width, found.height, found.num_frames, found.fps)
        if film.fps:
            frames = videos.frames(film, limits)
        else:  # chosen by the client
            if film.num_frames > (most := MAX_MEDIA * videos.group):
                raise ValueError(f"has {film.num_frames} frames; the limit is {most}")
            film = film._replace(fps=limits.listed_fps)
            frames = np.arange(film.num_frames)
        upright, turned = (
            videos.fit(each, len(frames), limits)
            for each in (film, film._replace(width=film.height, height=film.width))
        )
        check_sides(upright)
        self._times = videos.times(film, frames, upright.num_tokens)
        self._size = upright.size
        self.num_items = num = len(self._times)
        self.num_bytes = prod(upright.size) * 3 * num
        labels = videos.labels(film, frames)
        texts = [self._encode(label) if label else NO_IDS for label in labels]
        before, behind = (np.array(each, np.int32) for each in videos.around)
        features = np.full(upright.num_tokens, videos.placeholder, np.int32)
        group = np.concatenate([before, features, behind])
        self._ids, starts = interleaved(texts, [group] * len(labels))
        self._starts = [start + len(before) for start in starts]
        self.num_tokens = len(self._ids)
        return Targets(
            width_and_height(upright),
            width_and_height(turned),
            frames=frames.tolist(),
            stamps=[*videos.stamps(film, frames)],
            font=videos.font,
        )

    def medium(self, pixels: Pixels | None, salt: str) -> ReadMedium:
        size, groups = self._size, [NO_PIXELS] * self.num_items
        if pixels is not None:
            size = self._videos.group, pixels.height, pixels.width
            groups = _in_groups(pixels.data, self.num_items, prod(size) * 3)
        num = self._family.num_tokens(size)
        items = (
            item_of(self.kind, start, num, size, data, salt, time)
            for start, data, time in zip(self._starts, groups, self._times, strict=True)
        )
        return ReadMedium(self.kind, self._ids, tuple(items))


def _in_groups(data: Array, num: int, num_bytes: int) -> list[Array]:
    """``num`` groups of frames with ``num_bytes`` each; the last frame is repeated."""
    lacking = num * num_bytes - data.nbytes
    if lacking:
        data = np.concatenate((data, data[-lacking:]))
    return [*data.reshape(num, num_bytes)]


def interleaved(texts: Sequence[Array], items: Sequence[Array]) -> tuple[Array, list[int]]:
    """The ids of ``items``, each behind one of ``texts``, of which there may be one more; and the
    starts of the items."""
    pairs = zip_longest(texts, items, fillvalue=NO_IDS)
    pieces = [piece for pair in pairs for piece in pair]
    ends = np.cumsum([len(each) for each in pieces]).tolist()
    return np.concatenate(pieces), ends[: 2 * len(items) : 2]


def item_of(
    kind: MediumKind,
    start: int,
    num_tokens: int,
    size: Size,
    pixels: Array,
    salt: str,
    time: int = 0,
) -> ReadItem:
    digest = digest_of(kind, size, pixels.data, salt, time) if len(pixels) else b""
    return ReadItem(start, num_tokens, size, digest, pixels, time)


def check_sides(fit: Fit) -> None:
    if max(fit.size) > MAX_SIDE:
        raise ValueError(f"has a side above {MAX_SIDE} pixels after scaling")


def width_and_height(fit: Fit) -> tuple[int, int]:
    _, height, width = fit.size
    return width, height
