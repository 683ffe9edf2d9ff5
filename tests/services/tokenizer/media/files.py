"""Files of images, good and bad."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from shared.wire.codec import Array
from tests.media.pictures import picture


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> Array:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return np.frombuffer(file.getvalue(), np.uint8)


def open_file(file: Array) -> Image.Image:
    return Image.open(io.BytesIO(file.tobytes()))


def with_orientation(number: int) -> Array:
    exif = Image.Exif()
    exif[0x0112] = number
    return file_of(picture(3, 90, 60), "JPEG", exif=exif)


def with_alpha() -> Image.Image:
    image = picture(4, 80, 64).convert("RGBA")
    rows, columns = np.mgrid[0:64, 0:80]
    image.putalpha(Image.fromarray((rows * 3 % 256 ^ columns).astype(np.uint8)))
    return image


def animation(kind: str) -> Array:
    frames = [picture(seed, 64, 64) for seed in (5, 6)]
    return file_of(frames[0], kind, save_all=True, append_images=frames[1:])


def png_of(width: int, height: int, data: bytes = b"") -> Array:
    """A PNG whose header promises that size in 8 bits of grey."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return np.frombuffer(b"\x89PNG\r\n\x1a\n" + content, np.uint8)


def bomb(side: int) -> Array:
    """A small file that is decoded to ``side``² bytes."""
    return png_of(side, side, zlib.compress(bytes(side * (side + 1)), 9))
