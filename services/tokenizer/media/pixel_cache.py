"""Images and videos that were read, by their file. Pure."""

from collections import OrderedDict
from hashlib import blake2b

import msgspec

from services.tokenizer.media.placeholders import ReadMedium
from shared.media.family import PixelLimits, VideoLimits
from shared.wire.codec import Array


def key_of(file: Array, limits: PixelLimits | VideoLimits, salt: str) -> bytes:
    """Pixels are shared between requests with the same ``salt`` only."""
    key = blake2b(msgspec.msgpack.encode((limits, salt)), digest_size=16)
    key.update(file.data)
    return key.digest()


class PixelCache:
    """The media that were used last, with at most ``max_bytes`` of pixels."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._media: OrderedDict[bytes, ReadMedium] = OrderedDict()

    def get(self, key: bytes) -> ReadMedium | None:
        found = self._media.get(key)
        if found is not None:
            self._media.move_to_end(key)
        return found

    def add(self, key: bytes, medium: ReadMedium) -> None:
        if key in self._media or medium.num_bytes > self._max_bytes:
            return
        self._media[key] = medium
        self._num_bytes += medium.num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._media.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
