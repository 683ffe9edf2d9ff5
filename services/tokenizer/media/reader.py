"""The process that reads images and videos: ``python -m services.tokenizer.media.reader FD
MAX_PIXELS``.

A file can crash a decoder, or keep it busy. So this process does nothing else and may die of a
file; its parent then starts another. ``reader_messages.py`` has the messages on stdin and stdout.
"""

import io
import signal
import sys
import warnings
from itertools import product

import msgspec
from PIL import Image, TiffImagePlugin, UnidentifiedImageError, WebPImagePlugin

from services.tokenizer.media.films import Unwatchable, VideoFile
from services.tokenizer.media.reader_messages import (
    NO_VIEW,
    Answer,
    File,
    Targets,
    put,
    take,
)
from services.tokenizer.media.upright import draw, upright
from shared.child_process import child
from shared.media.family import WITH_ARTICLE
from shared.media.frame_list import MAX_FRAMES, unpack

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
NO_IMAGE = "is no image in JPEG, PNG, WebP or GIF"
PLUGINS = (TiffImagePlugin, WebPImagePlugin)  # of EXIF, and one that Pillow imports late
PIXEL_BYTES = 24  # the decoder and canvases of a WebP with transparency: the most of any format
MORE_BYTES = 256 << 20  # for a file


class _TooLarge(Exception):
    pass


def main() -> None:
    if not child.begin():
        return
    fd, max_pixels = int(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    Image.MAX_IMAGE_PIXELS = None  # ours is exact
    child.limit_memory(PIXEL_BYTES * max_pixels + MORE_BYTES)
    child.write(Answer())
    while asked := child.read():
        file = msgspec.msgpack.decode(asked, type=File)
        signal.setitimer(signal.ITIMER_PROF, file.max_cpu_s)  # its signal ends the process
        answer = _answer(fd, file, max_pixels)
        signal.setitimer(signal.ITIMER_PROF, 0)
        child.write(answer)


def _answer(fd: int, file: File, max_pixels: int) -> Answer:
    data = bytearray(file.num_bytes)
    take(fd, memoryview(data))
    try:
        return (
            _image(fd, data, max_pixels) if file.kind == "image" else _video(fd, data, max_pixels)
        )
    except (_TooLarge, Unwatchable) as error:
        return Answer(error=str(error))
    except UnidentifiedImageError:
        return Answer(error=NO_IMAGE)
    except Exception:  # Pillow documents none
        return Answer(error=f"is {WITH_ARTICLE[file.kind]} that cannot be decoded")


def _image(fd: int, data: bytearray, max_pixels: int) -> Answer:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        targets = _targets(Answer(image.width, image.height), max_pixels)
        if targets is None:
            return Answer()
        whole, is_turned = upright(image)
        made = _tiles if targets.tile else _crops if targets.boxes else _middle
        frames = made(whole, targets, is_turned)
    place = 0
    for frame in frames:
        place = _put(fd, frame, place)
    view, num = (frames[-1].size, len(frames) - 1) if targets.views else (NO_VIEW, len(frames))
    return Answer(*frames[0].size, num_frames=num, view=view, is_turned=is_turned)


def _tiles(whole: Image.Image, targets: Targets, is_turned: bool) -> list[Image.Image]:
    width, height = targets.turned if is_turned else targets.upright
    assert targets.tile is not None
    across, down = targets.tile
    large = _resized(whole, (width, height), targets)
    corners = product(range(0, height, down), range(0, width, across))
    tiles = [large.crop((left, top, left + across, top + down)) for top, left in corners]
    view = targets.views[is_turned] if targets.views else targets.tile
    return [*tiles, _resized(whole, view, targets)] if len(tiles) > 1 else tiles


def _middle(whole: Image.Image, targets: Targets, is_turned: bool) -> list[Image.Image]:
    return [scaled(whole, targets, is_turned)]


def _crops(whole: Image.Image, targets: Targets, is_turned: bool) -> list[Image.Image]:
    """After the whole image."""
    size = targets.turned if is_turned else targets.upright
    boxes = targets.turned_boxes if is_turned else targets.boxes
    return [_resized(each, size, targets) for each in (whole, *map(whole.crop, boxes))]


def _video(fd: int, data: bytearray, max_pixels: int) -> Answer:
    listed = unpack(data)
    if listed is not None:
        return _frames(fd, listed, max_pixels)
    film = VideoFile(data)
    targets = _targets(_found(film), max_pixels)
    if targets is None:
        return Answer()
    assert targets.frames is not None
    target, place = targets.upright, 0
    turns = set()
    for number, (image, is_turned) in enumerate(film.frames(targets.frames)):
        turns.add(is_turned)
        if len(turns) > 1:
            raise Unwatchable("is a video whose frames differ in orientation")
        draw(image, targets, number)
        target = targets.turned if is_turned else targets.upright
        place = _put(fd, _resized(image, target, targets), place)
    return Answer(*target, num_frames=len(targets.frames))


def _found(film: VideoFile) -> Answer:
    return Answer(film.width, film.height, num_frames=film.num_frames, fps=film.fps)


def _frames(fd: int, files: list[bytes], max_pixels: int) -> Answer:
    """A list of images; all of them have the size of the first one after they are scaled."""
    if len(files) > MAX_FRAMES:
        raise Unwatchable(f"has {len(files)} frames; the limit is {MAX_FRAMES}")
    sizes = []
    for number, file in enumerate(files):
        try:
            with Image.open(io.BytesIO(file), formats=FORMATS) as image:
                sizes.append(image.size)
        except UnidentifiedImageError:
            raise Unwatchable(f"has a frame {number} that {NO_IMAGE}") from None
    (width, height), *others = sizes
    if any(size != (width, height) for size in others):
        raise Unwatchable("is a list of images that differ in size")
    targets = _targets(Answer(width, height, num_frames=len(files)), max_pixels)
    if targets is None:
        return Answer()
    place = 0
    for number, file in enumerate(files):
        with Image.open(io.BytesIO(file), formats=FORMATS) as image:
            whole, is_turned = upright(image)
            draw(whole, targets, number)
            pixels = scaled(whole, targets, is_turned)
        if number == 0:
            size = pixels.size
        if pixels.size != size:
            raise Unwatchable("is a list of images that differ in orientation")
        place = _put(fd, pixels, place)
    return Answer(*size, num_frames=len(files))


def _targets(found: Answer, max_pixels: int) -> Targets | None:
    """None for a file that is not wanted. Raises _TooLarge."""
    if found.width * found.height > max_pixels:
        size = f"{found.width} x {found.height}"
        raise _TooLarge(f"has {size} pixels; the limit is {max_pixels} (max-image-pixels)")
    child.write(found)
    asked = child.read()
    return msgspec.msgpack.decode(asked, type=Targets) if asked else None


def _put(fd: int, image: Image.Image, place: int) -> int:
    """Returns its end."""
    data = image.tobytes()
    put(fd, memoryview(data), place)
    return place + len(data)


def scaled(image: Image.Image, targets: Targets, is_turned: bool) -> Image.Image:
    """An upright image, scaled by the same code as in transformers' processors for Pillow."""
    image = _resized(image, targets.turned if is_turned else targets.upright, targets)
    if targets.crop is None:
        return image
    width, height = targets.crop
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def _resized(image: Image.Image, size: tuple[int, int], targets: Targets) -> Image.Image:
    return image.resize(size, Image.Resampling(targets.resample))


if __name__ == "__main__":
    main()
