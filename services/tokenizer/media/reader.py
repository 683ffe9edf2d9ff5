"""The process that reads images: ``python -m services.tokenizer.media.reader FD MAX_PIXELS
MAX_CPU_S``.

A file can crash a decoder, or keep it busy. So this process does nothing else and may die of a
file; its parent then starts another. ``reader_messages.py`` has the messages on stdin and stdout.
"""

import ctypes
import io
import os
import resource
import signal
import sys
import warnings

import msgspec
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin
from PIL.Image import Transpose

from services.tokenizer.media.reader_messages import LENGTH, Answer, File, Targets, frame, put, take

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
PLUGINS = (TiffImagePlugin, WebPImagePlugin)  # of EXIF, and one that Pillow imports late
PIXEL_BYTES = 24  # the decoder and canvases of a WebP with transparency: the most of any format
MORE_BYTES = 256 << 20  # for a file
ORIENTATION = 0x0112
TURNS = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
FIRST_QUARTER = 5  # from here on, orientations swap width and height

_PR_SET_PDEATHSIG = 1


class _TooLarge(Exception):
    pass


def main() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for our parent, which ends us
    fd, max_pixels, max_cpu_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # ours is exact
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory(PIXEL_BYTES * max_pixels + MORE_BYTES)
    _write(Answer())
    while asked := _read():
        signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # its signal ends the process
        answer = _answer(fd, msgspec.msgpack.decode(asked, type=File), max_pixels)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answer)


def _answer(fd: int, file: File, max_pixels: int) -> Answer:
    data = bytearray(file.num_bytes)
    take(fd, memoryview(data))
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                size = f"{image.width} x {image.height}"
                raise _TooLarge(f"has {size} pixels; the limit is {max_pixels} (max-image-pixels)")
            _write(Answer(image.width, image.height))
            asked = _read()
            if not asked:
                return Answer()
            pixels = scaled(image, msgspec.msgpack.decode(asked, type=Targets))
        put(fd, memoryview(pixels.tobytes()))
    except _TooLarge as error:
        return Answer(error=str(error))
    except UnidentifiedImageError:
        return Answer(error="is no image in JPEG, PNG, WebP or GIF")
    except Exception:  # Pillow documents none
        return Answer(error="is an image that cannot be decoded")
    return Answer(pixels.width, pixels.height)


def scaled(image: Image.Image, targets: Targets) -> Image.Image:
    """The first frame in RGB, upright, with transparent parts in white. Scaled by the same code as
    in transformers' processors for Pillow."""
    image.load()
    orientation = _orientation(image)
    image = _with_8_bits(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA"))
        del white
    image = image if image.mode == "RGB" else image.convert("RGB")
    if orientation in TURNS:
        image = image.transpose(TURNS[orientation])
    target = targets.turned if orientation >= FIRST_QUARTER else targets.upright
    return image.resize(target, Image.Resampling.BICUBIC)


def _orientation(image: Image.Image) -> int:
    """Upright if the EXIF data cannot be read: the pixels can."""
    try:
        found = image.getexif().get(ORIENTATION)
    except Exception:
        found = None
    return found if found in TURNS else 1


def _with_8_bits(image: Image.Image) -> Image.Image:
    """The upper halves of 16 bits, which ``convert`` would cap at 255."""
    if not image.mode.startswith("I"):
        return image
    image = image.point(lambda value: value * (1 / 256)).convert("L")
    image.info.pop("transparency", None)
    return image


def _limit_memory(more_bytes: int) -> None:
    """More than the process has now."""
    with open("/proc/self/statm") as file:
        num_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def _read() -> bytes:
    """Nothing for an empty message and at the end of the pipe, which may come in the middle."""
    head = sys.stdin.buffer.read(LENGTH.size)
    size = LENGTH.unpack(head)[0] if len(head) == LENGTH.size else 0
    data = sys.stdin.buffer.read(size)
    return data if len(data) == size else b""


def _write(answer: Answer) -> None:
    """Ends the process if the pipe has no reader any more."""
    try:
        os.write(sys.stdout.fileno(), frame(answer))
    except BrokenPipeError:
        os._exit(0)


if __name__ == "__main__":
    main()
