"""Images of Gemma 4: ids, pixels and sizes equal those of transformers' processor."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import ImageOps
from transformers.models.gemma4 import image_processing_pil_gemma4 as theirs

from services.tokenizer.media.limits import with_detail, with_kwargs
from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import SOFT_TOKENS, PixelLimits
from shared.media.gemma4 import FilledRows
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.messages import Convert, Medium
from tests.media.checkpoints import MAX_LEN, nest, preprocessor
from tests.media.gemma4_checkpoints import (
    END,
    PATCH,
    POOL,
    SIDE,
    SMALL,
    START,
    TOKEN,
    VIDEO,
    FilledReference,
    gemma4_reference,
    save_gemma4,
)
from tests.media.pictures import picture
from tests.services.tokenizer.media.files import file_of, open_file, with_orientation
from tests.services.tokenizer.media.test_requests import Tokenizer, chat, image, text, user
from tests.services.worker.checkpoints import change_config

SIZES = [(1, 1), (200, 1), (84, 120), (301, 99), (30, 141), (500, 420)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    save_gemma4(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> FilledReference:
    return gemma4_reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> FilledRows:
    found = read_family(folder)
    assert isinstance(found, FilledRows)
    return found


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Tokenizer]:
    model = TextModel(folder, MAX_LEN, 264)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


def wanted(
    oracle: FilledReference, messages: list[dict[str, Any]], images: list[Any]
) -> dict[str, Any]:
    prompt = oracle.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return oracle.inputs(prompt, images)


async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: FilledReference
) -> None:
    """Also of images that are turned by a quarter."""
    files = [file_of(picture(seed, *size)) for seed, size in enumerate(SIZES)]
    files += [with_orientation(number) for number in (1, 3, 6, 8)]
    parts = [text("Which?\n"), *map(image, range(4)), text("\n\n a"), *map(image, range(4, 10))]
    messages = [user(*parts, text("\nb"))]
    generate, (ids, _, *pixels) = await tokenizer.ask(*chat(messages, len(files)), *files)
    upright = [ImageOps.exif_transpose(open_file(file)) for file in files]
    expected = wanted(oracle, messages, upright)
    assert ids.tolist() == expected["input_ids"][0].tolist()
    by_digest = dict(zip({each.digest: 0 for each in generate.items}, pixels, strict=True))
    given = zip(generate.items, expected["pixel_values"], strict=True)
    for item, values in given:
        placeholders = ids[item.start : item.start + item.num_tokens]
        assert (placeholders == oracle.model.config.image_token_id).all()
        found = by_digest[item.digest].reshape((*item.size[1:], 3)) / 255
        patches = theirs.convert_image_to_patches(found.transpose(2, 0, 1), PATCH)
        np.testing.assert_allclose(values[: len(patches)], patches, rtol=1e-6)
        assert not values[len(patches) :].any()


def test_sizes_match_transformers(family: FilledRows) -> None:
    random, shapes = np.random.default_rng(0), set()
    for _ in range(400):
        most = int(random.choice(SOFT_TOKENS))
        limits = PixelLimits(1, most * SIDE**2, soft_tokens=most)
        height, width = np.exp(random.uniform(0, np.log(4000), 2)).astype(int).tolist()
        if max(height, width) > 200 * min(height, width):
            with pytest.raises(ValueError, match=f"{width} x {height} pixels; one side may be 200"):
                family.fit(width, height, limits)
            continue
        expected = theirs.get_aspect_ratio_preserving_size(
            height, width, PATCH, most * POOL**2, POOL
        )
        size, num_tokens, *_ = family.fit(width, height, limits)
        assert size == (1, *expected)
        assert num_tokens == family.num_tokens(size) == np.prod(expected) // SIDE**2 <= most
        shapes.add(tuple(each == SIDE for each in expected))
    assert len(shapes) == 3  # rows, columns and others
    with pytest.raises(ValueError, match="no image of the model"):
        family.num_tokens((1, SIDE, SIDE + PATCH))


def test_a_request_may_lower_the_number_of_tokens(folder: Path, tmp_path: Path) -> None:
    preprocessor(folder, tmp_path, max_soft_tokens=280)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    family = read_family(tmp_path)
    assert family is not None
    for most in (70, 140, 280):
        limits = with_kwargs(family.limits, f'{{"max_soft_tokens": {most}}}', family.options)
        assert most / 2 < family.fit(900, 800, limits).num_tokens <= most
    for wrong in (0, 100, 560):
        with pytest.raises(ValueError, match=f"max_soft_tokens is {wrong}; it may be 70, 140, 280"):
            with_kwargs(family.limits, f'{{"max_soft_tokens": {wrong}}}', family.options)
    with pytest.raises(ValueError, match="max_pixels is not for this model; it takes max_soft"):
        with_kwargs(family.limits, '{"max_pixels": 100}', family.options)


def test_an_image_of_low_detail_has_fewer_tokens(folder: Path, tmp_path: Path) -> None:
    """512² pixels are 113 tokens of 48² pixels."""
    preprocessor(folder, tmp_path, max_soft_tokens=280, patch_size=16)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    family = read_family(tmp_path)
    assert family is not None
    assert family.fit(500, 400, family.limits).num_tokens > 200
    assert 35 < family.fit(500, 400, with_detail(family.limits, "low")).num_tokens <= 70


async def test_texts_that_stand_for_an_image_or_a_video_are_refused(tokenizer: Tokenizer) -> None:
    for token in (TOKEN, VIDEO):
        asked = chat([user(image(0), text(token))], 1)
        failed = await tokenizer.ask(*asked, file_of(picture(0, 9, 9)))
        assert (failed.status, failed.param) == (400, "messages[0]")
        assert f"holds the text {token}" in failed.message


async def test_a_prompt_as_a_text_has_the_texts_around_its_images(tokenizer: Tokenizer) -> None:
    body = msgspec.json.encode([user(text("a\n"), image(0))])
    to_text = Convert("r", "chat", False, to="text", media=[Medium()])
    files = [file_of(picture(0, 9, 9))]
    found = await tokenizer.convert(to_text, np.frombuffer(body, np.uint8), *files)
    assert f"a\n{START}{TOKEN}{END}" in found.tobytes().decode()


def test_files_of_both_kinds_tell_the_visible_keys_of_tokens(folder: Path, tmp_path: Path) -> None:
    """In a published folder, the processor's file describes images."""
    for name in ("config.json", "tokenizer.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    nest(tmp_path)
    family = read_family(tmp_path)
    assert isinstance(family, FilledRows)
    assert family.are_whole
    change_config(tmp_path, text_config=SMALL)
    family = read_family(tmp_path)
    assert isinstance(family, FilledRows)
    assert not family.are_whole
    (tmp_path / "processor_config.json").write_text("{}")
    assert read_family(tmp_path) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample 3"),
        ({"max_soft_tokens": 100}, "max_soft_tokens is 100; it may be"),
        ({"pooling_kernel_size": 0}, "pooling_kernel_size 0; they may be 1 or more"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_other_ways_to_scale_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str, is_nested: bool
) -> None:
    preprocessor(folder, tmp_path, **changes)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    name = "processor_config.json" if is_nested else "preprocessor_config.json"
    if is_nested:
        nest(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}: .*{message}"):
        read_family(tmp_path)
