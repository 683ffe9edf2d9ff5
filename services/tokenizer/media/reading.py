"""Reads the media of prompts: files become pixels of the model's size."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.tokenizer.media.fitting import Fitting, ImageFitting, VideoFitting
from services.tokenizer.media.limits import with_detail, with_kwargs
from services.tokenizer.media.metrics import CACHE_HITS, CACHE_MISSES, READ_SECONDS
from services.tokenizer.media.part_fitting import CropFitting, PartFitting
from services.tokenizer.media.pixel_cache import PixelCache, key_of
from services.tokenizer.media.pixel_memory import Hold, PixelMemory
from services.tokenizer.media.placeholders import NoImages, Placeholder, ReadMedia, ReadMedium
from services.tokenizer.media.reader_messages import Answer, Targets
from services.tokenizer.media.readers import ChooseTargets, Pixels, Readers, Unreadable
from services.tokenizer.media_reader import MediaReader, PromptMedia
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError, InvalidRequest
from shared.media.families import read_family, written_by_templates
from shared.media.family import (
    Family,
    Marked,
    PixelLimits,
    VideoLimits,
    limits_of,
    options_of,
    placeholders_of,
)
from shared.media.lfm2_vl import TilesAndView
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.codec import Array
from shared.wire.messages import MAX_MEDIA, Convert, Medium, MediumKind, Submit

log = logging.getLogger(__name__)

MAX_PROMPT_BYTES = 128 << 20  # of pixels: a peer counts as lost in the time of twice as many
MAX_WAITING_BYTES = 4 * MAX_PROMPT_BYTES  # of pixels of all prompts. Chosen
SOURCE_IMAGES = 4  # of the largest size may be the files of a prompt. Chosen
MAX_ENCODED = 4096  # texts. Chosen
KWARGS = "mm_processor_kwargs"


class _Wanted(NamedTuple):
    """A file that ``num`` media of a prompt have, and the first of these."""

    medium: Medium
    file: Array
    limits: PixelLimits | VideoLimits
    num: int

    def refusal(self, text: str) -> InvalidRequest:
        param = self.medium.param or "messages"
        return InvalidRequest(f"{param} {text}", param=param)


class _Room:
    """For the different files of one prompt, in ``max_tokens`` if its turns cannot be dropped."""

    def __init__(self, max_tokens: int | None, max_source_pixels: int, hold: Hold) -> None:
        self._max_tokens = max_tokens
        self._max_source_pixels = max_source_pixels
        self._hold = hold
        self._num_tokens = 0
        self._num_bytes = 0
        self._num_source_pixels = 0
        self._num_items = 0

    def take(self, wanted: _Wanted, found: Fitting | ReadMedium, num_source: int) -> None:
        """``found`` is the file's part of a prompt. Raises InvalidRequest."""
        self._num_tokens += found.num_tokens * wanted.num
        self._num_items += found.num_items * wanted.num
        self._num_bytes += found.num_bytes
        self._num_source_pixels += num_source
        if self._max_tokens is not None and self._num_tokens >= self._max_tokens:
            raise InvalidRequest(
                f"the context holds {self._max_tokens} tokens (max-model-len): the prompt has"
                f" {self._num_tokens} or more of images and videos alone",
                param="prompt",
                code="context_length_exceeded",
            )
        if self._num_bytes > MAX_PROMPT_BYTES:
            raise wanted.refusal(
                f"makes {self._num_bytes} bytes of pixels of the prompt's files; the limit is"
                f" {MAX_PROMPT_BYTES}"
            )
        if self._num_items > MAX_MEDIA:
            raise wanted.refusal(
                f"makes {self._num_items} images and groups of frames of the prompt's files; the"
                f" limit is {MAX_MEDIA}"
            )
        if self._num_source_pixels > self._max_source_pixels:
            raise wanted.refusal(
                f"makes {self._num_source_pixels} pixels of the prompt's files; the limit is"
                f" {self._max_source_pixels} ({SOURCE_IMAGES} x max-image-pixels)"
            )

    def hold(self, name: Hashable, num_bytes: int) -> None:
        """Until the prompt is sent. Raises Unavailable."""
        self._hold.add(name, num_bytes)


class MediaReading(MediaReader):
    """``limits`` hold for requests without their own and bound these. ``texts`` has the text of
    each placeholder, and ``encode`` gives the ids [n] int32 of a text. The files of a prompt have
    at most ``max_source_pixels``; of a video one frame counts."""

    def __init__(
        self,
        family: Family,
        texts: Mapping[MediumKind, str],
        max_model_len: int,
        limits: Mapping[MediumKind, PixelLimits | VideoLimits],
        max_source_pixels: int,
        readers: Readers,
        cache: PixelCache,
        encode: Callable[[str], Array],
    ) -> None:
        self.kinds = ("image",)
        self.more_kinds = tuple(kind for kind in texts if kind != "image")
        self._family = family
        self._marked = family if isinstance(family, Marked) else None
        ids = placeholders_of(family)
        self._placeholders = [Placeholder(ids[kind], text, kind) for kind, text in texts.items()]
        self._no_images = NoImages(self._placeholders)
        self._options = options_of(family)
        self._max_model_len = max_model_len
        self._limits = limits
        self._readers = readers
        self._cache = cache
        self._encode = lru_cache(MAX_ENCODED)(encode)  # of the few texts between parts
        self._max_source_pixels = max_source_pixels
        self._memory = PixelMemory(MAX_WAITING_BYTES)

    async def read(
        self, message: Submit | Convert, files: Sequence[Array], salt: str, owner: str
    ) -> PromptMedia:
        if not message.media:
            return self._no_images
        limits = self._limits_of(message)
        keys = await asyncio.to_thread(
            lambda: [key_of(*each, salt) for each in zip(files, limits, strict=True)]
        )
        num_of = Counter(keys)
        wanted = {
            key: _Wanted(medium, file, limit, num_of[key])
            for key, medium, file, limit in zip(keys, message.media, files, limits, strict=True)
        }
        hold = Hold(self._memory)
        max_tokens = self._max_model_len if _is_read_whole(message) else None
        room = _Room(max_tokens, self._max_source_pixels, hold)
        read = self._size if isinstance(message, Convert) else self._medium
        readings = {
            key: asyncio.create_task(read(key, each, room, salt, owner))
            for key, each in wanted.items()
        }
        try:
            await asyncio.gather(*readings.values())
        except BaseException:
            for reading in readings.values():
                reading.cancel()
            hold.end()
            raise
        media = [readings[key].result() for key in keys]
        about = self._placeholders, self._max_model_len
        return ReadMedia(media, *about, hold, self._marked)

    async def close(self) -> None:
        await self._readers.close()

    def _limits_of(self, message: Submit | Convert) -> list[PixelLimits | VideoLimits]:
        found: dict[MediumKind, PixelLimits | VideoLimits] = {}
        for medium in message.media:
            if medium.kind not in self._limits:
                param = medium.param or "messages"
                raise InvalidRequest(f"{param}: the model takes no {medium.kind}s", param=param)
        try:
            for kind in {medium.kind for medium in message.media}:
                found[kind] = with_kwargs(self._limits[kind], message.media_options, self._options)
        except ValueError as error:
            raise InvalidRequest(f"{KWARGS}: {error}", param=KWARGS) from None
        return [with_detail(found[medium.kind], medium.detail) for medium in message.media]

    def _fitting(self, wanted: _Wanted) -> Fitting:
        if isinstance(wanted.limits, PixelLimits):
            if isinstance(self._family, TilesAndView):
                return PartFitting(self._family, wanted.limits, self._encode)
            if self._marked is None or wanted.limits.scan is None:
                return ImageFitting(self._family, wanted.limits)
            return CropFitting(self._family, self._marked, wanted.limits, self._encode)
        assert self._family.videos is not None
        return VideoFitting(self._family, self._family.videos, wanted.limits, self._encode)

    async def _size(
        self, key: bytes, wanted: _Wanted, room: _Room, salt: str, owner: str
    ) -> ReadMedium:
        """Without pixels and digest."""
        fitting = self._fitting(wanted)

        def choose(found: Answer) -> None:
            _fit(fitting, found, wanted, room)

        await self._pixels(wanted, choose, owner)
        return fitting.medium(None, salt)

    async def _medium(
        self, key: bytes, wanted: _Wanted, room: _Room, salt: str, owner: str
    ) -> ReadMedium:
        if known := self._cache.get(key):
            CACHE_HITS.inc()
            room.take(wanted, known, known.num_source_pixels)
            for item in known.items:
                room.hold(item.digest, item.pixels.nbytes)
            return known
        CACHE_MISSES.inc()
        fitting, num_source_pixels = self._fitting(wanted), 0

        def choose(found: Answer) -> Targets:
            nonlocal num_source_pixels
            num_source_pixels = found.width * found.height
            targets = _fit(fitting, found, wanted, room)
            room.hold(object(), fitting.num_bytes)
            return targets

        with READ_SECONDS.time():
            pixels = await self._pixels(wanted, choose, owner)
            medium = await asyncio.to_thread(fitting.medium, pixels, salt)
        medium = medium._replace(num_source_pixels=num_source_pixels)
        self._cache.add(key, medium)
        return medium

    async def _pixels(self, wanted: _Wanted, choose: ChooseTargets, owner: str) -> Pixels | None:
        kind, file = wanted.medium.kind, wanted.file
        try:
            return await self._readers.read(file, owner, choose, kind)
        except Unreadable as error:
            raise wanted.refusal(str(error)) from None


def _fit(fitting: Fitting, found: Answer, wanted: _Wanted, room: _Room) -> Targets:
    try:
        targets = fitting.fit(found)
    except ValueError as error:
        raise wanted.refusal(str(error)) from None
    room.take(wanted, fitting, found.width * found.height)
    return targets


def _is_read_whole(message: Submit | Convert) -> bool:
    return isinstance(message, Submit) and not (message.chat and message.chat.history_limit)


def media_for(text: TextModel, folder: Path, config: TokenizerConfig) -> MediaReader:
    """The reader for the model's media; it refuses all for a model without. Raises ConfigError."""
    family = read_family(folder)
    if family is None:
        return MediaReader()
    added, texts = text.added_texts(False), dict[MediumKind, str]()
    for kind, placeholder in placeholders_of(family).items():
        if placeholder not in added:
            raise ConfigError(f"model: its tokenizer has no added token {placeholder} of {kind}s")
        texts[kind] = added[placeholder]
    for written, kind in written_by_templates(folder).items():
        text.templates.replace(written, texts[kind])
    kwargs = msgspec.json.encode(config.mm_processor_kwargs).decode()
    limits, options, videos = limits_of(family), options_of(family), family.videos
    # Workers have memory for images, and for frames of their size.
    most = 0 if videos is None else family.limits.max_pixels // videos.num_in_tower
    try:
        for kind, each in limits.items():
            limits[kind] = with_kwargs(each, kwargs, options, most if kind == "video" else 0)
    except ValueError as error:
        raise ConfigError(f"mm-processor-kwargs: {error}") from None
    if videos is not None and videos.font and not Path(videos.font).is_file():
        log.warning("videos: %s is missing; Pillow's font is on the frames", videos.font)
    return MediaReading(
        family,
        texts,
        text.max_model_len,
        limits,
        SOURCE_IMAGES * config.max_image_pixels,
        Readers(config.media_readers, config.max_image_pixels),
        PixelCache(int(config.mm_processor_cache_gb * (1 << 30))),
        partial(text.encode, adds_special_tokens=False),
    )
