"""Images of GLM-OCR: sizes, pixels and ids equal transformers'."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.media.families import read_family
from shared.media.qwen2_5_vl import RepeatedSquares
from shared.settings.tokenizer import TokenizerConfig
from tests.media.checkpoints import MAX_LEN, preprocessor
from tests.media.glm_checkpoints import GlmReference, glm_reference, save_glm
from tests.media.pictures import picture
from tests.services.tokenizer.media.files import file_of
from tests.services.tokenizer.media.test_requests import (
    Tokenizer,
    chat,
    expected,
    image,
    text,
    user,
)

PICTURES = [picture(seed, *size) for seed, size in enumerate([(9, 30), (300, 200), (112, 84)])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    save_glm(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> GlmReference:
    return glm_reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> RepeatedSquares:
    found = read_family(folder)
    assert isinstance(found, RepeatedSquares)
    return found


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Tokenizer]:
    model = TextModel(folder, MAX_LEN, 263)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


def test_sizes_match_transformers(family: RepeatedSquares) -> None:
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(0, np.log(2000), (1000, 2))).astype(int).tolist()
    limits = family.limits
    assert limits[:2] == (56 * 56, 280 * 280)
    for width, height in sizes:
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(ValueError, match="one side may be 200 times the other"):
                family.fit(width, height, limits)
            continue
        areas = {"min_pixels": 2 * limits.min_pixels, "max_pixels": 2 * limits.max_pixels}
        wanted = smart_resize(2, height, width, **areas)
        fit = family.fit(width, height, limits)
        assert fit.size == (1, *wanted)
        assert fit.num_tokens == family.num_tokens(fit.size) == wanted[0] * wanted[1] // 28**2


async def test_a_prompt_is_that_of_transformers(tokenizer: Tokenizer, oracle: GlmReference) -> None:
    messages = [user(text("Which?"), image(1), image(0), text(" Or?"), image(2))]
    files = [file_of(each) for each in PICTURES]
    generate, (ids, _, *pixels) = await tokenizer.ask(*chat(messages, 3), *files)
    wanted = expected(oracle, messages, [PICTURES[number] for number in (1, 0, 2)])
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    read = [
        each.reshape((*item.size[1:], 3)) for item, each in zip(generate.items, pixels, strict=True)
    ]
    found = oracle.images(images=read, return_tensors="pt")
    assert (found["pixel_values"] == wanted["pixel_values"]).all()


def test_limits_of_a_file_count_two_frames(folder: Path, tmp_path: Path) -> None:
    preprocessor(folder, tmp_path, size={})
    found = read_family(tmp_path)
    assert found is not None
    assert found.limits[:2] == (112 * 112 // 2, 28 * 28 * 7500)
