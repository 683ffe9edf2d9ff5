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
from PIL.Image import Transpose

from services.tokenizer.media.films import Unwatchable, VideoFile
from services.tokenizer.media.reader_messages import Answer, File, Targets, put, take
from shared.media.family import WITH_ARTICLE
from shared.media.frame_list import MAX_FRAMES, unpack
from shared.process import child

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
NO_IMAGE = "is no image in JPEG, PNG, WebP or GIF"
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
        if targets.tile:
            frames = _tiles(image, targets)
        elif targets.boxes:
            frames = _crops(image, targets)
        else:
            frames = [scaled(image, targets)]
    place = 0
    for frame in frames:
        place = _put(fd, frame, place)
    return Answer(*frames[0].size, num_frames=len(frames))


def _tiles(image: Image.Image, targets: Targets) -> list[Image.Image]:
    whole, turned = upright(image)
    width, height = targets.turned if turned else targets.upright
    assert targets.tile is not None
    across, down = targets.tile
    large = whole.resize((width, height), Image.Resampling.BICUBIC)
    corners = product(range(0, height, down), range(0, width, across))
    tiles = [large.crop((left, top, left + across, top + down)) for top, left in corners]
    view = whole.resize(targets.tile, Image.Resampling.BICUBIC)
    return [*tiles, view] if len(tiles) > 1 else tiles


def _crops(image: Image.Image, targets: Targets) -> list[Image.Image]:
    """After the whole image."""
    whole, turned = upright(image)
    size = targets.turned if turned else targets.upright
    boxes = targets.turned_boxes if turned else targets.boxes
    resample = Image.Resampling(targets.resample)
    return [each.resize(size, resample) for each in (whole, *map(whole.crop, boxes))]


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
    for image, is_turned in film.frames(targets.frames):
        turns.add(is_turned)
        if len(turns) > 1:
            raise Unwatchable("is a video whose frames differ in orientation")
        target = targets.turned if is_turned else targets.upright
        place = _put(fd, image.resize(target, Image.Resampling.BICUBIC), place)
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
            pixels = scaled(image, targets)
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


def scaled(image: Image.Image, targets: Targets) -> Image.Image:
    """The upright image, scaled by the same code as in transformers' processors for Pillow."""
    image, is_turned = upright(image)
    target = targets.turned if is_turned else targets.upright
    image = image.resize(target, Image.Resampling(targets.resample))
    if targets.crop is None:
        return image
    width, height = targets.crop
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def upright(image: Image.Image) -> tuple[Image.Image, bool]:
    """The first frame in RGB, upright, with transparent parts in white; True: it was turned by a
    quarter."""
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
    return image, orientation >= FIRST_QUARTER


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


if __name__ == "__main__":
    main()
