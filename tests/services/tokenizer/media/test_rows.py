"""Images of Mistral 3: sizes, pixels and ids are those of transformers."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from services.tokenizer.media.pixel_cache import PixelCache
from services.tokenizer.media.readers import Readers
from services.tokenizer.media.reading import MediaReading
from services.tokenizer.text_model import TextModel
from shared.media.families import read_family
from shared.media.family import PixelLimits, limits_of
from shared.media.pixtral import RowsOfPatches
from shared.wire.messages import ChoiceStart, Medium
from tests.media.checkpoints import MAX_LEN
from tests.media.llava_checkpoints import (
    LONGEST,
    MEDIA,
    RowsReference,
    rows_reference,
    save_mistral3,
)
from tests.media.pictures import picture
from tests.services.tokenizer.media.files import file_of
from tests.services.tokenizer.media.test_requests import (
    NO_IDS,
    Tokenizer,
    chat,
    expected,
    image,
    text,
    user,
)

MAX_IMAGE_PIXELS = 1 << 20
IMAGE, BREAK, END = MEDIA
PICTURES = [picture(seed, 60 + 90 * seed, 100) for seed in range(3)]
FILES = [file_of(each) for each in PICTURES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mistral3")
    save_mistral3(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> RowsReference:
    return rows_reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> RowsOfPatches:
    found = read_family(folder)
    assert isinstance(found, RowsOfPatches)
    return found


@pytest.fixture
async def tokenizer(folder: Path, family: RowsOfPatches) -> AsyncIterator[Tokenizer]:
    readers, model = Readers(2, MAX_IMAGE_PIXELS), TextModel(folder, MAX_LEN, 262)
    limits, cache = limits_of(family), PixelCache(1 << 24)
    common = MAX_LEN, limits, 4 * MAX_IMAGE_PIXELS, readers, cache
    reading = MediaReading(family, {"image": IMAGE}, *common, model.encode)
    yield Tokenizer(model, reading)
    await reading.close()


def test_sizes_and_ids_match_transformers(family: RowsOfPatches, oracle: RowsReference) -> None:
    random = np.random.default_rng(0)
    sizes = [(1, 1), (LONGEST, 1), (28, 28), (29, 28), (LONGEST, LONGEST), (LONGEST + 1, LONGEST)]
    sizes += np.exp(random.uniform(0, np.log(400), (300, 2))).astype(int).tolist()
    for width, height in sizes:
        if max(width, height) > LONGEST * min(width, height):
            problem = f"is {width} x {height} pixels; one side may be 224 times the other"
            with pytest.raises(ValueError, match=problem):
                family.fit(width, height, family.limits)
            continue
        fit = family.fit(width, height, family.limits)
        wanted = oracle.inputs(IMAGE, [Image.new("RGB", (width, height))])
        assert [fit.size[1:]] == [tuple(each) for each in wanted["image_sizes"].tolist()]
        ids = wanted["input_ids"][0].tolist()
        assert (family.ids(fit.size).tolist(), fit.num_tokens) == (ids, len(ids))
        assert family.num_tokens(fit.size) == len(ids)


def test_no_image_is_larger_than_its_limit(family: RowsOfPatches) -> None:
    for most in (1, 784, 785, 5000, 28**2 * 9, LONGEST**2):
        for size in ((900, 700), (28, 300), (500, 500)):
            _, height, width = family.fit(*size, PixelLimits(1, most)).size
            assert height * width <= max(most, 28**2)


async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: RowsReference
) -> None:
    """Texts may hold breaks and ends."""
    messages = [user(text("Which?" + END), image(1), image(0), text(BREAK + " Or?"), image(2))]
    generate, (ids, _, *pixels) = await tokenizer.ask(*chat(messages, 3), *FILES)
    wanted = expected(oracle, messages, [PICTURES[number] for number in (1, 0, 2)])
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    sizes = [list(item.size[1:]) for item in generate.items]
    assert sizes == wanted["image_sizes"].tolist()
    for item, each, padded in zip(generate.items, pixels, wanted["pixel_values"], strict=True):
        _, height, width = item.size
        found = oracle.images(images=[each.reshape(height, width, 3)], return_tensors="pt")
        assert (found["pixel_values"][0] == padded[:, :height, :width]).all()


async def test_a_replay_as_ids_is_the_same_prompt(tokenizer: Tokenizer) -> None:
    messages = [user(image(1), image(0), text(BREAK))]
    generate, (ids, *_) = await tokenizer.ask(*chat(messages, 2), *FILES[:2])
    media, start = [Medium(), Medium()], ChoiceStart(0)
    submit, *_ = chat([], 0, kind="ids", media=media, attempt=2, choices=[start])
    again, (same, *_) = await tokenizer.ask(submit, ids, NO_IDS, FILES[1], FILES[0])
    assert (again.items, same.tolist()) == (generate.items, ids.tolist())
    first = generate.items[0]
    cut = np.delete(ids, first.end - 1)
    other_break = ids.copy()
    other_break[first.end - 1] = 7
    for changed in (cut, other_break, ids[: first.end], np.append(ids, ids[first.start])):
        failed = await tokenizer.ask(submit, changed, NO_IDS, FILES[1], FILES[0])
        assert (failed.status, failed.param) == (400, "prompt")
        assert "as the model writes them" in failed.message


async def test_texts_with_the_placeholder_are_refused(tokenizer: Tokenizer) -> None:
    failed = await tokenizer.ask(*chat([user(image(0), text(IMAGE))], 1), FILES[0])
    assert (failed.status, failed.param) == (400, "messages[0]")
    failed = await tokenizer.ask(*chat([user(text(IMAGE))], 0))
    assert (failed.status, failed.param) == (400, "prompt")


@pytest.mark.parametrize("options", ['{"min_pixels": 9}', '{"size": {"longest_edge": 112}}'])
async def test_names_of_other_families_are_refused(tokenizer: Tokenizer, options: str) -> None:
    asked = chat([user(image(0))], 1, media_options=options)
    failed = await tokenizer.ask(*asked, FILES[0])
    assert (failed.status, failed.param) == (400, "mm_processor_kwargs")
    assert "is not for this model; it takes max_pixels" in failed.message
