"""Pixels are those of transformers' processor, for each kind of file."""

import numpy as np
import pytest
from PIL import Image, ImageOps

from services.tokenizer.media.reader import FORMATS, scaled
from services.tokenizer.media.reader_messages import Targets
from services.tokenizer.media.upright import upright as upright_image
from shared.media.families import read_family
from shared.media.family import Family
from tests.media.families import FAMILIES
from tests.media.pictures import picture
from tests.media.references import Reference
from tests.services.tokenizer.media.files import (
    animation,
    file_of,
    open_file,
    with_alpha,
    with_orientation,
)

pytestmark = pytest.mark.parametrize("checkpoint", FAMILIES, indirect=True, scope="session")

GREY = picture(7, 70, 50).convert("L")
PALETTE = picture(8, 70, 50).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)

FILES = {
    **{f"EXIF {number}": with_orientation(number) for number in range(1, 9)},
    "RGB": file_of(picture(1, 300, 200)),
    "JPEG": file_of(picture(2, 641, 333), "JPEG"),
    "WebP": file_of(picture(2, 64, 333), "WEBP"),
    "WebP with alpha": file_of(with_alpha(), "WEBP", lossless=True),
    "RGBA": file_of(with_alpha()),
    "LA": file_of(with_alpha().convert("LA")),
    "L": file_of(GREY),
    "L with a transparent shade": file_of(GREY, transparency=40),
    "RGB with a transparent colour": file_of(Image.new("RGB", (60, 60)), transparency=(0, 0, 0)),
    "1": file_of(GREY.convert("1")),
    "P": file_of(PALETTE),
    "P with a transparent colour": file_of(PALETTE, transparency=0),
    "P with transparencies": file_of(PALETTE, transparency=bytes(range(0, 256, 16))),
    "CMYK": file_of(picture(9, 80, 60).convert("CMYK"), "JPEG"),
    "1 x 1": file_of(picture(1, 1, 1)),
    "200 x 1": file_of(picture(1, 200, 1)),
    "1 x 200": file_of(picture(1, 1, 200)),
    "56 x 56": file_of(picture(1, 56, 56)),
    "GIF": file_of(PALETTE, "GIF", transparency=3),
    "GIF of several frames": animation("GIF"),
    "WebP of several frames": animation("WEBP"),
}


@pytest.fixture(scope="module")
def family(checkpoint) -> Family:
    found = read_family(checkpoint)
    assert found is not None
    return found


def pixels_of(family: Family, file: np.ndarray) -> Image.Image:
    image = open_file(file)
    sizes = [image.size, image.size[::-1]]
    upright, turned = (family.fit(*size, family.limits).size[:0:-1] for size in sizes)
    whole, is_turned = upright_image(image)
    return scaled(whole, Targets(upright, turned), is_turned)


@pytest.mark.parametrize("name", FILES)
def test_pixels_match_transformers(name: str, family: Family, transformers: Reference):
    file = FILES[name]
    assert open_file(file).format in (*FORMATS, "MPO")
    images = transformers.images
    expected = images(images=[ImageOps.exif_transpose(open_file(file))], return_tensors="np")
    pixels = pixels_of(family, file)
    found = images(images=[pixels], do_resize=False, return_tensors="np")
    assert found["image_grid_thw"].tolist() == expected["image_grid_thw"].tolist()
    assert (found["pixel_values"] == expected["pixel_values"]).all()


def test_orientations_differ(checkpoint):
    """Otherwise the test above could not see them."""
    turned = [ImageOps.exif_transpose(open_file(FILES[f"EXIF {num}"])) for num in range(1, 9)]
    assert len({image.tobytes() for image in turned}) == 8


def test_the_upper_byte_of_16_bits_is_left(family: Family, transformers: Reference):
    side = 2 * transformers.side
    shades = np.arange(side * side, dtype=np.uint16).reshape(side, side) * 16
    image = pixels_of(family, file_of(Image.fromarray(shades)))
    expected = np.repeat((shades >> 8)[..., None], 3, -1)
    assert (np.array(image) == expected).all()


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_data_that_cannot_be_read_turn_nothing(family: Family):
    file = file_of(picture(3, 90, 60), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    plain = file_of(picture(3, 90, 60), "JPEG")
    assert pixels_of(family, file).tobytes() == pixels_of(family, plain).tobytes()
