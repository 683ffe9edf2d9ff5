"""Images of InternVL and Qianfan-OCR: tiles and ids equal transformers'."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import PixelLimits
from shared.media.internvl import Tiles
from shared.settings.tokenizer import TokenizerConfig
from tests.media.checkpoints import MAX_LEN, preprocessor
from tests.media.internvl_checkpoints import (
    IMAGE,
    SIDE,
    TEXT,
    TilesReference,
    save_internvl,
    save_qianfan,
    tiles_reference,
)
from tests.media.pictures import picture
from tests.services.tokenizer.media.files import file_of, open_file, with_orientation
from tests.services.tokenizer.media.test_requests import (
    Tokenizer,
    chat,
    expected,
    image,
    text,
    user,
)

SIZES = [(1, 1), (200, 1), (56, 56), (57, 56), (112, 112), (301, 99), (30, 141), (150, 100)]


@pytest.fixture(scope="module", params=[save_internvl, save_qianfan])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles")
    request.param(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> TilesReference:
    return tiles_reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> Tiles:
    found = read_family(folder)
    assert isinstance(found, Tiles)
    return found


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Tokenizer]:
    model = TextModel(folder, MAX_LEN, 262)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


def test_sizes_and_ids_match_transformers(family: Tiles, oracle: TilesReference) -> None:
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(0, np.log(200), (300, 2))).astype(int).tolist()
    nums = set()
    for width, height in [*SIZES, *sizes]:
        fit = family.fit(width, height, family.limits)
        num = oracle.images.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        assert fit.size == (num, SIDE, SIDE)
        assert len(family.ids(fit.size)) == fit.num_tokens == family.num_tokens(fit.size)
        nums.add(num)
    assert nums == {1, 3, 4, 5, 6, 7}
    wanted = oracle.inputs(IMAGE, [Image.new("RGB", (150, 100))])["input_ids"][0].tolist()
    assert family.ids(family.fit(150, 100, family.limits).size).tolist() == wanted


def test_no_image_is_larger_than_its_limit(family: Tiles) -> None:
    for most in (1, SIDE**2, 3 * SIDE**2, 5 * SIDE**2, 6 * SIDE**2 - 1):
        for size in ((900, 700), (28, 300), (500, 500)):
            num, *_ = family.fit(*size, PixelLimits(1, most)).size
            assert num * SIDE**2 <= max(most, SIDE**2)


async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: TilesReference
) -> None:
    """Images that are turned by a quarter have the tiles of the upright ones."""
    files = [file_of(picture(seed, *size)) for seed, size in enumerate(SIZES)]
    files += [with_orientation(number) for number in (1, 3, 6, 8)]
    messages = [user(text("Which?"), *map(image, range(len(files))))]
    generate, (ids, _, *pixels) = await tokenizer.ask(*chat(messages, len(files)), *files)
    wanted = expected(
        oracle, messages, [ImageOps.exif_transpose(open_file(file)) for file in files]
    )
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    tiles = [
        Image.fromarray(tile)
        for item, each in zip(generate.items, pixels, strict=True)
        for tile in each.reshape((*item.size, 3))
    ]
    found = oracle.images(images=tiles, return_tensors="pt")["pixel_values"]
    assert (found == wanted["pixel_values"]).all()


async def test_the_text_that_a_template_writes_is_no_placeholder_elsewhere(
    tokenizer: Tokenizer, oracle: TilesReference
) -> None:
    """Qianfan-OCR's is no token."""
    file = file_of(picture(0, SIDE, SIDE))
    generate, (ids, *_) = await tokenizer.ask(*chat([user(text(TEXT), image(0))], 1), file)
    (item,) = generate.items
    before = oracle.tokenizer("<|im_start|>user\n" + TEXT)["input_ids"]
    assert ids[: item.start].tolist() == before


async def test_fewer_tiles_may_be_asked_for(tokenizer: Tokenizer) -> None:
    asked = chat([user(image(0))], 1, media_options=f'{{"max_pixels": {3 * SIDE**2}}}')
    generate, _ = await tokenizer.ask(*asked, file_of(picture(0, 300, 300)))
    assert [item.size for item in generate.items] == [(1, SIDE, SIDE)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample 3"),
        ({"size": {"height": 56, "width": 57}}, "56 x 57; the tower takes 56 x 56"),
        ({"min_patches": 7}, "min_patches is 7 and max_patches 6; they may be 1 to 64"),
        ({"max_patches": 65}, "max_patches 65"),
    ],
    ids=str,
)
def test_other_ways_to_cut_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    preprocessor(folder, tmp_path, **changes)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=text):
        read_family(tmp_path)


def test_an_item_has_tiles_of_one_size(family: Tiles) -> None:
    for size in ((1, SIDE, 70), (2, SIDE, SIDE), (8, SIDE, SIDE), (0, SIDE, SIDE)):
        with pytest.raises(ValueError, match="no image of the model"):
            family.num_tokens(size)
