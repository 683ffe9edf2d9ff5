"""Images as the model sees them before they are scaled: upright, in RGB, and frames of videos with
their times, drawn as by transformers' processor of ERNIE-4.5-VL."""

from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont
from PIL.Image import Transpose

from services.tokenizer.media.reader_messages import Targets

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


SHARE = 0.1  # of the shorter side is the height of a text, and of that its edge
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


def draw(image: Image.Image, targets: Targets, number: int) -> None:
    """The stamp of the frame ``number``, if there are stamps, in the upper left corner."""
    if not targets.stamps:
        return
    size = int(min(image.size) * SHARE)
    ImageDraw.Draw(image).text(
        (0, 0),
        targets.stamps[number],
        font=_font(targets.font, size),
        fill=BLACK,
        stroke_width=int(size * SHARE),
        stroke_fill=WHITE,
    )


@lru_cache(4)
def _font(file: str, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own if ``file`` is missing, or no font."""
    try:
        return ImageFont.truetype(file, size)
    except OSError:
        return ImageFont.load_default(size)
