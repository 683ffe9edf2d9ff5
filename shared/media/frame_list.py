"""A video as a list of images, in one buffer. Pure."""

from collections.abc import Sequence

import msgspec
import numpy as np

from shared.wire.codec import Array
from shared.wire.messages import MAX_MEDIA

MAX_FRAMES = 2 * MAX_MEDIA  # two make an item
MAGIC = b"\x00frames\x00"  # begins no file of a video


def pack(frames: Sequence[Array]) -> Array:
    """frames [n] uint8, files of images → [n] uint8"""
    data = MAGIC + msgspec.msgpack.encode([each.data for each in frames])
    return np.frombuffer(data, np.uint8)


def unpack(data: bytes | bytearray) -> list[bytes] | None:
    """None for other files. Raises MsgspecError."""
    if not data.startswith(MAGIC):
        return None
    return msgspec.msgpack.decode(memoryview(data)[len(MAGIC) :], type=list[bytes])
