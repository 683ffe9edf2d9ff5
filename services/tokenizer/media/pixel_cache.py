"""Images that were read, by their file. Pure."""

from collections import OrderedDict
from hashlib import blake2b

import msgspec

from services.tokenizer.media.placeholders import ReadImage
from shared.media.family import PixelLimits
from shared.wire.codec import Array


def key_of(file: Array, limits: PixelLimits, salt: str) -> bytes:
    """Images are shared between requests with the same ``salt`` only."""
    key = blake2b(msgspec.msgpack.encode((limits, salt)), digest_size=16)
    key.update(file.data)
    return key.digest()


class PixelCache:
    """The images that were used last, with at most ``max_bytes`` of pixels."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: OrderedDict[bytes, ReadImage] = OrderedDict()

    def get(self, key: bytes) -> ReadImage | None:
        found = self._images.get(key)
        if found is not None:
            self._images.move_to_end(key)
        return found

    def add(self, key: bytes, image: ReadImage) -> None:
        if key in self._images or image.pixels.nbytes > self._max_bytes:
            return
        self._images[key] = image
        self._num_bytes += image.pixels.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self._num_bytes -= oldest.pixels.nbytes
