"""Pictures for tests of images."""

import io

import numpy as np
from PIL import Image


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Discs on a gradient."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    shades = [rows / height, columns / width, (rows + columns) / (height + width)]
    pixels = np.stack(shades, -1) * 255 * random.random(3)
    for _ in range(6):
        row, column, radius = random.random(3) * (height, width, min(height, width) / 2)
        is_inside = (rows - row) ** 2 + (columns - column) ** 2 < radius**2
        pixels[is_inside] = random.random(3) * 255
    return Image.fromarray(pixels.astype(np.uint8))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()
