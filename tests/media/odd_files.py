"""Files of images that try to hurt, and good ones of odd forms."""

import gzip
import io
import struct
import zlib
from typing import Any

from PIL import Image

from tests.media.pictures import picture

SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = b"\0\0\0\0IEND\xaeB`\x82"
ORIENTATION = 0x0112
MAX_PIXELS = 1 << 20  # of the server
PICTURE = picture(7, 90, 60)
# The rotation and mirroring that turn a picture into its file, by orientation.
BACK = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, content: bytes = b"", checksum: int | None = None) -> bytes:
    found = zlib.crc32(kind + content) if checksum is None else checksum
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", found)


def header(width: int, height: int, depth: int = 8, color: int = 0, interlace: int = 0) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace))


def png_of(*chunks: bytes) -> bytes:
    return SIGNATURE + b"".join(chunks) + END


def pixels(width: int, height: int) -> bytes:
    return chunk(b"IDAT", zlib.compress(bytes((width + 1) * height), 9))


def jpeg_with(size: tuple[int, int], marker: int = 0xC0, depth: int = 8) -> bytes:
    """A JPEG whose frame promises another size, kind or depth."""
    file = bytearray(saved(PICTURE, "JPEG"))
    start = file.index(b"\xff\xc0")
    file[start + 1] = marker
    file[start + 4] = depth
    file[start + 5 : start + 9] = struct.pack(">HH", size[1], size[0])
    return bytes(file)


def gif_of(
    canvas: tuple[int, int], frame: tuple[int, int], lzw: bytes = b"\x02\x02\x4c\x01\0"
) -> bytes:
    screen = struct.pack("<HH", *canvas) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    return b"GIF89a" + screen + b"," + struct.pack("<HHHH", 0, 0, *frame) + b"\0" + lzw + b";"


def riff(kind: bytes, content: bytes, size: int | None = None) -> bytes:
    body = kind + content
    return b"RIFF" + struct.pack("<I", len(body) if size is None else size) + body


def extended_webp(width: int, height: int) -> bytes:
    content = b"\x10\0\0\0" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return riff(b"WEBP", b"VP8X" + struct.pack("<I", 10) + content)


def lossless_webp(width: int, height: int) -> bytes:
    content = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(8)
    return riff(b"WEBP", b"VP8L" + struct.pack("<I", len(content)) + content)


def damaged(file: bytes, start: int, piece: bytes) -> bytes:
    return file[:start] + piece + file[start + len(piece) :]


def bad_files() -> dict[str, bytes]:
    """Files without an image that the model takes."""
    png, jpeg, gif, webp = (saved(PICTURE, kind) for kind in ("PNG", "JPEG", "GIF", "WEBP"))
    large = MAX_PIXELS // 1024 + 1
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    table = jpeg.index(b"\xff\xc4")
    data = png.index(b"IDAT")
    return {
        "empty": b"",
        "one byte": b"\x89",
        "zeros": bytes(4096),
        "text": b"a picture",
        "json": b'{"url": "file:///etc/passwd"}',
        "html": b"<!doctype html><title>404</title>",
        "html in utf-16": "<!doctype html>".encode("utf-16"),
        "html before a png": b"<html>" + png,
        "svg": svg,
        "svg with a head": b'<?xml version="1.0"?><!DOCTYPE svg [<!ENTITY a SYSTEM "file:///">]>'
        + svg,
        "svg, compressed": gzip.compress(svg),
        "png, compressed": gzip.compress(png),
        "pdf": b"%PDF-1.7\n" + png,
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        "zip": b"PK\x03\x04" + bytes(60),
        "program": b"\x7fELF" + bytes(60),
        "pickle": b"\x80\x04\x95" + bytes(60),
        "movie": b"\0\0\0\x18ftypmp42" + bytes(60),
        "sound": riff(b"WAVE", bytes(60)),
        **{
            kind.lower(): saved(PICTURE, kind)
            for kind in ("TIFF", "ICO", "BMP", "PPM", "TGA", "PCX", "ICNS", "DDS")
        },
        "tiff bomb": b"II*\0\x08\0\0\0\x02\0"
        + struct.pack("<HHII", 256, 4, 1, 1 << 30)
        + struct.pack("<HHII", 257, 4, 1, 1 << 30)
        + bytes(4),
        "png: signature": SIGNATURE,
        "png: cut in its header": png[:20],
        "png: cut in its data": png[: len(png) // 2],
        "png: no header": png_of(chunk(b"IDAT", b"")),
        "png: no data": png_of(header(9, 9)),
        "png: no width": png_of(header(0, 9), pixels(0, 9)),
        "png: no height": png_of(header(9, 0), pixels(9, 0)),
        "png: largest size": png_of(header(2**31 - 1, 2**31 - 1), pixels(9, 9)),
        "png: negative size": png_of(header(2**32 - 1, 2**32 - 1), pixels(9, 9)),
        "png: bomb of its header": png_of(header(30_000, 30_000), pixels(9, 9)),
        "png: bomb of its data": png_of(header(1024, large), pixels(1024, large)),
        "png: bomb of its text": png_of(
            header(9, 9), chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(64 << 20), 9)), pixels(9, 9)
        ),
        "png: too few pixels": png_of(header(900, 900), pixels(9, 9)),
        "png: data of another kind": png_of(header(9, 9), chunk(b"IDAT", b"no zlib")),
        "png: wrong checksum of its header": SIGNATURE
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 0, 0, 0, 0), checksum=0)
        + pixels(9, 9)
        + END,
        "png: damaged data": damaged(png, data + 40, b"\xff" * 40),
        "png: depth of 3": png_of(header(9, 9, depth=3), pixels(9, 9)),
        "png: color of 5": png_of(header(9, 9, color=5), pixels(9, 9)),
        "png: 1 x 900": png_of(header(1, 900), pixels(1, 900)),
        "png: 900 x 1": png_of(header(900, 1), pixels(900, 1)),
        "jpeg: start": b"\xff\xd8\xff",
        "jpeg: cut in its tables": jpeg[:300],
        "jpeg: cut in its data": jpeg[: len(jpeg) // 2],
        "jpeg: largest size": jpeg_with((65535, 65535)),
        "jpeg: no width": jpeg_with((0, 60)),
        "jpeg: no height": jpeg_with((90, 0)),
        "jpeg: lossless": jpeg_with((90, 60), marker=0xC3),
        "jpeg: 12 bits": jpeg_with((90, 60), depth=12),
        "jpeg: broken table": damaged(jpeg, table + 4, b"\xff" * 20),
        "jpeg: no data": jpeg[: jpeg.index(b"\xff\xda")] + b"\xff\xd9",
        "gif: signature": b"GIF89a",
        "gif: no frame": b"GIF89a" + struct.pack("<HH", 9, 9) + b"\0\0\0;",
        "gif: no size": gif_of((0, 0), (0, 0)),
        "gif: bomb of its canvas": gif_of((65535, 65535), (1, 1)),
        "gif: bomb of its frame": gif_of((1, 1), (65535, 65535)),
        "gif: broken code": gif_of((90, 60), (90, 60), b"\xff\x02\x4c\x01\0"),
        "gif: a program": b"GIF89a=1/*" + bytes(60) + b"*/",
        "webp: head": riff(b"WEBP", b""),
        "webp: cut": webp[: len(webp) // 2],
        "webp: wrong length": riff(b"WEBP", webp[12:], size=4),
        "webp: bomb of its canvas": extended_webp(1 << 24, 1 << 24),
        "webp: bomb of its header": lossless_webp(16383, 16383),
        "webp: damaged": damaged(webp, 20, b"\xff" * 60),
        "webp: unknown chunk": riff(b"WEBP", b"EVIL" + struct.pack("<I", 1 << 30)),
        "gif: cut in its head": gif[:11],
    }


def turned(orientation: int) -> bytes:
    """PICTURE in a file that is turned, without loss."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    back = BACK[orientation]
    image = PICTURE if back is None else PICTURE.transpose(back)
    return saved(image, "PNG", exif=exif)


def same_files() -> dict[str, bytes]:
    """Each shows PICTURE to the model."""
    png = saved(PICTURE, "PNG")
    opaque = PICTURE.copy()
    opaque.putalpha(255)
    frames = [PICTURE, picture(8, 90, 60)]
    return {
        **{f"orientation {number}": turned(number) for number in BACK},
        "orientation 99": saved(PICTURE, "PNG", exif=b"Exif\0\0MM\0*\0\0\0\x08" + bytes(99)),
        "bytes behind its end": png + b"PK\x03\x04<script>",
        "broken profile": saved(PICTURE, "PNG", icc_profile=b"no profile"),
        "opaque": saved(opaque, "PNG"),
        "lossless webp": saved(PICTURE, "WEBP", lossless=True),
        "opaque webp": saved(opaque, "WEBP", lossless=True, exact=True),
        "animated png": saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "animated webp": saved(
            frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True
        ),
    }


def good_files() -> dict[str, bytes]:
    """Each gives some image."""
    gray, deep = PICTURE.convert("L"), Image.new("I;16", (90, 60), 40_000)
    palette = PICTURE.convert("P")
    exif = saved(PICTURE, "JPEG", exif=b"Exif\0\0" + b"\xff" * 99)
    return {
        "cmyk jpeg": saved(PICTURE.convert("CMYK"), "JPEG"),
        "gray jpeg": saved(gray, "JPEG"),
        "progressive jpeg": saved(PICTURE, "JPEG", progressive=True),
        "jpeg with broken exif": exif,
        "jpeg with a page in it": saved(PICTURE, "JPEG", comment=b"<html>"),
        "two jpegs": saved(PICTURE, "MPO", save_all=True, append_images=[PICTURE]),
        "gray png": saved(gray, "PNG"),
        "gray png with transparency": saved(PICTURE.convert("LA"), "PNG"),
        "16-bit png": saved(deep, "PNG"),
        "16-bit rgb png": png_of(
            header(9, 9, depth=16, color=2), chunk(b"IDAT", zlib.compress(bytes(55 * 9)))
        ),
        "1-bit png": saved(PICTURE.convert("1"), "PNG"),
        "png with a palette": saved(palette, "PNG", transparency=3),
        "png without its palette": png_of(header(9, 9, color=3), pixels(9, 9)),
        "1 x 1": saved(PICTURE.resize((1, 1)), "PNG"),
        "1 x 200": saved(PICTURE.resize((1, 200)), "PNG"),
        "animated gif": saved(palette, "GIF", save_all=True, append_images=[palette]),
        "largest": png_of(header(1024, 1024), pixels(1024, 1024)),
    }
