"""Times on the frames of videos, drawn as by transformers' processor of ERNIE-4.5-VL."""

from functools import lru_cache

from PIL import Image, ImageDraw, ImageFont

from services.tokenizer.media.reader_messages import Targets

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
