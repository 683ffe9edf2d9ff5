"""Images of Gemma 3: ids, pixels and parts equal those of transformers' processor."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image, ImageOps

from services.tokenizer.media.limits import with_detail, with_kwargs
from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import PanAndScan
from shared.media.gemma3 import StretchedSquare, crops_of
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.messages import Convert, Medium
from tests.media.checkpoints import MAX_LEN, preprocessor
from tests.media.gemma3_checkpoints import (
    NUM_TOKENS,
    SIDE,
    START,
    TOKEN,
    StretchedReference,
    gemma3_reference,
    save_gemma3,
)
from tests.media.pictures import picture
from tests.services.tokenizer.media.files import file_of, open_file, with_orientation
from tests.services.tokenizer.media.test_requests import Tokenizer, chat, image, text, user

SIZES = [(1, 1), (200, 1), (56, 56), (57, 56), (301, 99), (30, 141), (150, 100), (500, 420)]
SCAN = '{"do_pan_and_scan": true, "pan_and_scan_min_crop_size": 20}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    save_gemma3(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> StretchedReference:
    return gemma3_reference(folder)


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Tokenizer]:
    model = TextModel(folder, MAX_LEN, 264)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


def wanted(
    oracle: StretchedReference, messages: list[dict[str, Any]], images: list[Any], **options: Any
) -> dict[str, Any]:
    prompt = oracle.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return oracle.inputs(prompt, images, **options)


@pytest.mark.parametrize("scans", [False, True])
async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: StretchedReference, scans: bool
) -> None:
    """Texts with line ends around an image too. Images that are turned by a quarter have the parts
    of the upright ones."""
    files = [file_of(picture(seed, *size)) for seed, size in enumerate(SIZES)]
    files += [with_orientation(number) for number in (1, 3, 6, 8)]
    parts = [text("Which?\n"), *map(image, range(6)), text("\n\n a"), *map(image, range(6, 12))]
    messages = [user(*parts, text("\nb"))]
    options = {"media_options": SCAN} if scans else {}
    asked = chat(messages, len(files), **options)
    generate, (ids, _, *pixels) = await tokenizer.ask(*asked, *files)
    upright = [ImageOps.exif_transpose(open_file(file)) for file in files]
    more = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20} if scans else {}
    expected = wanted(oracle, messages, upright, **more)
    assert ids.tolist() == expected["input_ids"][0].tolist()
    assert (len(generate.items) > len(files)) == scans
    assert {(each.num_tokens, each.size) for each in generate.items} == {
        (NUM_TOKENS, (1, SIDE, SIDE))
    }
    squares = [Image.fromarray(each.reshape(SIDE, SIDE, 3)) for each in pixels]
    found = oracle.images(images=squares, return_tensors="pt")["pixel_values"]
    digests = dict.fromkeys(each.digest for each in generate.items)
    by_digest = dict(zip(digests, found, strict=True))
    for each, values in zip(generate.items, expected["pixel_values"], strict=True):
        np.testing.assert_array_equal(by_digest[each.digest], values)


def test_parts_match_transformers(oracle: StretchedReference) -> None:
    random = np.random.default_rng(0)
    nums = set()
    for _ in range(200):
        width, height = np.exp(random.uniform(0, np.log(900), 2)).astype(int).tolist()
        scan = PanAndScan(True, int(random.integers(1, 300)), int(random.integers(1, 6)), 1.1)
        pixels = np.zeros((3, height, width), np.uint8)
        theirs = oracle.images.pan_and_scan(pixels, *scan[1:])
        theirs = [each for each in theirs if each.size]
        boxes = crops_of(width, height, scan)
        assert [(box[3] - box[1], box[2] - box[0]) for box in boxes] == [
            each.shape[1:] for each in theirs
        ]
        nums.add(len(boxes))
    assert nums >= {0, 2, 3}


def test_an_image_of_low_detail_has_no_parts(folder: Path) -> None:
    family = read_family(folder)
    assert family is not None
    limits = with_kwargs(family.limits, SCAN, family.options)
    assert family.fit(300, 100, limits).boxes
    assert not family.fit(300, 100, with_detail(limits, "low")).boxes


async def test_a_text_that_stands_for_an_image_is_refused(tokenizer: Tokenizer) -> None:
    for name in (START, TOKEN):
        asked = chat([user(image(0), text(name))], 1)
        failed = await tokenizer.ask(*asked, file_of(picture(0, 9, 9)))
        assert (failed.status, failed.param) == (400, "messages[0]")
        assert f"holds the text {name}" in failed.message
    generate, _ = await tokenizer.ask(*chat([user(text(f"no image: {START}"))], 0))
    assert not generate.items


async def test_a_prompt_as_a_text_has_the_texts_around_its_images(
    tokenizer: Tokenizer, oracle: StretchedReference
) -> None:
    """One placeholder is there for all tokens of an image."""
    messages, files = [user(text("a\n"), image(0))], [file_of(picture(0, 9, 9))]
    body = msgspec.json.encode(messages)
    to_text = Convert("r", "chat", False, to="text", media=[Medium()])
    found = await tokenizer.convert(to_text, np.frombuffer(body, np.uint8), *files)
    written = found.tobytes().decode()
    assert written.count(TOKEN) == 1
    ids = oracle.tokenizer(written.replace(TOKEN, TOKEN * NUM_TOKENS))["input_ids"]
    expected = wanted(oracle, messages, [picture(0, 9, 9)])
    without_start = oracle.tokenizer.apply_chat_template(messages, tokenize=False)
    assert expected["input_ids"][0].tolist()[: len(ids)] == ids
    assert START in without_start


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 3}, "resample 2"),
        ({"size": {"height": 56, "width": 57}}, "56 x 57; the tower takes 56 x 56"),
        ({"pan_and_scan_max_num_crops": 65}, "is 65; it may be 1 to 64"),
        ({"pan_and_scan_min_crop_size": 0}, "is 0, below 1"),
    ],
    ids=str,
)
def test_other_ways_to_scale_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    preprocessor(folder, tmp_path, **changes)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=message):
        read_family(tmp_path)


def test_a_file_may_ask_for_parts(folder: Path, tmp_path: Path) -> None:
    preprocessor(folder, tmp_path, do_pan_and_scan=True, pan_and_scan_max_num_crops=3)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    family = read_family(tmp_path)
    assert isinstance(family, StretchedSquare)
    assert len(family.fit(2000, 300, family.limits).boxes) == 3
