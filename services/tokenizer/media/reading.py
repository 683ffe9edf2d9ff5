"""Reads the images of prompts: files become pixels of the model's size."""

import asyncio
from collections import Counter
from collections.abc import Hashable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from services.tokenizer.media.limits import with_detail, with_kwargs
from services.tokenizer.media.metrics import CACHE_HITS, CACHE_MISSES, READ_SECONDS
from services.tokenizer.media.pixel_cache import PixelCache, key_of
from services.tokenizer.media.pixel_memory import Hold, PixelMemory
from services.tokenizer.media.placeholders import NoImages, ReadImage, ReadImages
from services.tokenizer.media.reader_messages import Targets
from services.tokenizer.media.readers import Readers, Unreadable
from services.tokenizer.media_reader import MediaReader, PromptMedia
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError, InvalidRequest
from shared.media.families import read_family
from shared.media.family import Family, Fit, PixelLimits, digest_of
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.codec import Array
from shared.wire.messages import MAX_SIDE, Convert, Medium, Submit

MAX_PROMPT_BYTES = 128 << 20  # of pixels: a peer counts as lost in the time of twice as many
MAX_WAITING_BYTES = 4 * MAX_PROMPT_BYTES  # of pixels of all prompts. Chosen
SOURCE_IMAGES = 4  # of the largest size may be the files of a prompt. Chosen
NO_PIXELS = np.zeros(0, np.uint8)
KWARGS = "mm_processor_kwargs"


class _Wanted(NamedTuple):
    """A file that ``num`` media of a prompt have, and the first of these."""

    medium: Medium
    file: Array
    limits: PixelLimits
    num: int

    def refusal(self, text: str) -> InvalidRequest:
        param = self.medium.param or "messages"
        return InvalidRequest(f"{param} {text}", param=param)


class _Room:
    """For the different images of one prompt, in ``max_tokens`` if its turns cannot be dropped."""

    def __init__(self, max_tokens: int | None, max_source_pixels: int, hold: Hold) -> None:
        self._max_tokens = max_tokens
        self._max_source_pixels = max_source_pixels
        self._hold = hold
        self._num_tokens = 0
        self._num_bytes = 0
        self._num_source_pixels = 0

    def take(self, wanted: _Wanted, num_tokens: int, num_bytes: int, num_source: int) -> None:
        """An image of these tokens and pixels. Raises InvalidRequest."""
        self._num_tokens += num_tokens * wanted.num
        self._num_bytes += num_bytes
        self._num_source_pixels += num_source
        if self._max_tokens is not None and self._num_tokens >= self._max_tokens:
            raise InvalidRequest(
                f"the context holds {self._max_tokens} tokens (max-model-len): the prompt has"
                f" {self._num_tokens} or more of images alone",
                param="prompt",
                code="context_length_exceeded",
            )
        if self._num_bytes > MAX_PROMPT_BYTES:
            raise wanted.refusal(
                f"makes {self._num_bytes} bytes of pixels of the prompt's images; the limit is"
                f" {MAX_PROMPT_BYTES}"
            )
        if self._num_source_pixels > self._max_source_pixels:
            raise wanted.refusal(
                f"makes {self._num_source_pixels} pixels of the prompt's files; the limit is"
                f" {self._max_source_pixels} ({SOURCE_IMAGES} x max-image-pixels)"
            )

    def hold(self, name: Hashable, num_bytes: int) -> None:
        """Until the prompt is sent. Raises Unavailable."""
        self._hold.add(name, num_bytes)


class ImageReading(MediaReader):
    """``limits`` hold for requests without their own and bound these; ``placeholder_text`` is the
    text of the family's placeholder. The files of a prompt have at most ``max_source_pixels``."""

    def __init__(
        self,
        family: Family,
        placeholder_text: str,
        max_model_len: int,
        limits: PixelLimits,
        max_source_pixels: int,
        readers: Readers,
        cache: PixelCache,
    ) -> None:
        self.kinds = family.kinds
        self._family = family
        self._placeholder_text = placeholder_text
        self._no_images = NoImages(family.placeholder, placeholder_text)
        self._max_model_len = max_model_len
        self._limits = limits
        self._readers = readers
        self._cache = cache
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
        read = self._size if isinstance(message, Convert) else self._image
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
        images = [readings[key].result() for key in keys]
        return ReadImages(images, self._family.placeholder, self._placeholder_text, hold)

    async def close(self) -> None:
        await self._readers.close()

    def _limits_of(self, message: Submit | Convert) -> list[PixelLimits]:
        try:
            limits = with_kwargs(self._limits, message.media_options, self._family.options)
        except ValueError as error:
            raise InvalidRequest(f"{KWARGS}: {error}", param=KWARGS) from None
        return [with_detail(limits, medium.detail) for medium in message.media]

    async def _size(
        self, key: bytes, wanted: _Wanted, room: _Room, salt: str, owner: str
    ) -> ReadImage:
        """Without pixels and digest."""
        found: list[Fit] = []

        def choose(width: int, height: int) -> None:
            found.append(self._fits(width, height, wanted, room)[0])

        try:
            await self._readers.read(wanted.file, owner, choose)
        except Unreadable as error:
            raise wanted.refusal(str(error)) from None
        size = found[-1].size
        return ReadImage(size, self._family.ids(size), b"", NO_PIXELS)

    async def _image(
        self, key: bytes, wanted: _Wanted, room: _Room, salt: str, owner: str
    ) -> ReadImage:
        if found := self._cache.get(key):
            CACHE_HITS.inc()
            num_bytes = found.pixels.nbytes
            room.take(wanted, found.num_tokens, num_bytes, found.num_source_pixels)
            room.hold(found.digest, num_bytes)
            return found
        CACHE_MISSES.inc()
        num_source_pixels = 0

        def choose(width: int, height: int) -> Targets:
            nonlocal num_source_pixels
            num_source_pixels = width * height
            upright, turned = self._fits(width, height, wanted, room)
            room.hold(object(), prod(upright.size) * 3)
            whole, turned_whole = (
                fit.scaled or _width_and_height(fit) for fit in (upright, turned)
            )
            crop = None if upright.scaled is None else _width_and_height(upright)
            return Targets(whole, turned_whole, crop)

        with READ_SECONDS.time():
            try:
                read = await self._readers.read(wanted.file, owner, choose)
            except Unreadable as error:
                raise wanted.refusal(str(error)) from None
            assert read is not None
            width, height, pixels = read
            size = 1, height, width
            digest = await asyncio.to_thread(digest_of, wanted.medium.kind, size, pixels.data, salt)
        image = ReadImage(size, self._family.ids(size), digest, pixels, num_source_pixels)
        self._cache.add(key, image)
        return image

    def _fits(self, width: int, height: int, wanted: _Wanted, room: _Room) -> tuple[Fit, Fit]:
        """As it is stored, and turned by a quarter."""
        try:
            upright, turned = (
                self._family.fit(*each, wanted.limits)
                for each in ((width, height), (height, width))
            )
        except ValueError as error:
            raise wanted.refusal(str(error)) from None
        if max(upright.size) > MAX_SIDE:
            raise wanted.refusal(f"has a side above {MAX_SIDE} pixels after scaling")
        room.take(wanted, upright.num_tokens, prod(upright.size) * 3, width * height)
        return upright, turned


def _is_read_whole(message: Submit | Convert) -> bool:
    return isinstance(message, Submit) and not (message.chat and message.chat.history_limit)


def _width_and_height(fit: Fit) -> tuple[int, int]:
    _, height, width = fit.size
    return width, height


def media_for(text: TextModel, folder: Path, config: TokenizerConfig) -> MediaReader:
    """The reader for the model's images; it refuses all for a model without. Raises ConfigError."""
    family = read_family(folder)
    if family is None:
        return MediaReader()
    placeholder = text.added_texts(False).get(family.placeholder)
    if placeholder is None:
        raise ConfigError(f"model: its tokenizer has no added token {family.placeholder} of images")
    kwargs = msgspec.json.encode(config.mm_processor_kwargs).decode()
    try:
        limits = with_kwargs(family.limits, kwargs, family.options)
    except ValueError as error:
        raise ConfigError(f"mm-processor-kwargs: {error}") from None
    return ImageReading(
        family,
        placeholder,
        text.max_model_len,
        limits,
        SOURCE_IMAGES * config.max_image_pixels,
        Readers(config.media_readers, config.max_image_pixels),
        PixelCache(int(config.mm_processor_cache_gb * (1 << 30))),
    )
