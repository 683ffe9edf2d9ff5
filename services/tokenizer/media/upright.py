"""Images as the model sees them before they are scaled: upright, in RGB."""

from PIL import Image
from PIL.Image import Transpose

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
