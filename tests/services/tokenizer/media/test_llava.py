"""Images of LLaVA 1.5: pixels and ids are those of transformers."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageOps

from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.settings.tokenizer import TokenizerConfig
from tests.media.checkpoints import MAX_LEN, preprocessor
from tests.media.llava_checkpoints import SquareReference, save_llava, square_reference
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

SIZES = [(1, 1), (200, 1), (1, 200), (56, 56), (57, 56), (56, 99), (301, 204), (30, 41)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> SquareReference:
    return square_reference(folder)


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Tokenizer]:
    model = TextModel(folder, MAX_LEN, 260)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: SquareReference
) -> None:
    files = [file_of(picture(seed, *size)) for seed, size in enumerate(SIZES)]
    files += [with_orientation(number) for number in (1, 3, 6, 8)]
    messages = [user(text("Which?"), *map(image, range(len(files))))]
    generate, (ids, _, *pixels) = await tokenizer.ask(*chat(messages, len(files)), *files)
    pictures = [ImageOps.exif_transpose(open_file(file)) for file in files]
    wanted = expected(oracle, messages, pictures)
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    assert {item.num_tokens for item in generate.items} == {16}
    read = [each.reshape(56, 56, 3) for each in pixels]
    found = oracle.images(images=read, return_tensors="pt")
    assert (found["pixel_values"] == wanted["pixel_values"]).all()


async def test_images_that_are_too_long_and_limits_are_refused(tokenizer: Tokenizer) -> None:
    failed = await tokenizer.ask(*chat([user(image(0))], 1), file_of(picture(0, 201, 1)))
    assert (failed.status, failed.param) == (400, "image 0")
    asked = chat([user(image(0))], 1, media_options='{"max_pixels": 999}')
    failed = await tokenizer.ask(*asked, file_of(picture(0, 9, 9)))
    assert (failed.status, failed.param) == (400, "mm_processor_kwargs")
    assert "max_pixels is not for this model; it takes none" in failed.message


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"do_center_crop": False}, "do_center_crop"),
        ({"resample": 2}, "resample 3"),
        ({"size": {"shortest_edge": 55}}, "shortest_edge 55; the tower takes 56 x 56"),
        ({"crop_size": {"height": 56, "width": 57}}, "crop_size is 56 x 57"),
    ],
    ids=str,
)
def test_other_ways_to_scale_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    preprocessor(folder, tmp_path, **changes)
    with pytest.raises(ConfigError, match=text):
        read_family(tmp_path)


def test_an_item_has_one_size(folder: Path) -> None:
    family = read_family(folder)
    assert family is not None
    assert family.num_tokens((1, 56, 56)) == 16
    assert np.array_equal(family.positions([], 3), [[0, 1, 2]])
    for size in ((1, 56, 70), (2, 56, 56)):
        with pytest.raises(ValueError, match="no image of the model"):
            family.num_tokens(size)
