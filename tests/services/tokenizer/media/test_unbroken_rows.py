"""Images of LightOnOCR: sizes, pixels and ids are those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.pixtral import UnbrokenRows
from shared.settings.tokenizer import TokenizerConfig
from tests.media.checkpoints import MAX_LEN
from tests.media.llava_checkpoints import (
    LONGEST,
    MEDIA,
    PATCH,
    RowsReference,
    rows_reference,
    save_lighton,
)
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

IMAGE = MEDIA[0]
PICTURES = [picture(seed, 60 + 90 * seed, 100) for seed in range(3)]
FILES = [file_of(each) for each in PICTURES]


@pytest.fixture(
    scope="module",
    params=[PATCH, *(pytest.param(each, marks=pytest.mark.slow) for each in (2 * PATCH, 16))],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sides of images are multiples of single patches, of whole tokens, or of neither."""
    folder = tmp_path_factory.mktemp("lighton")
    save_lighton(folder, side=request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> RowsReference:
    return rows_reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> UnbrokenRows:
    found = read_family(folder)
    assert isinstance(found, UnbrokenRows)
    return found


def test_sizes_and_ids_match_transformers(family: UnbrokenRows, oracle: RowsReference) -> None:
    random = np.random.default_rng(0)
    sizes = [(1, 1), (28, 28), (29, 28), (LONGEST, LONGEST), (LONGEST + 1, LONGEST), (224, 14)]
    sizes += np.exp(random.uniform(0, np.log(400), (300, 2))).astype(int).tolist()
    for width, height in sizes:
        if max(width, height) > LONGEST * min(width, height):
            continue
        wanted = oracle.inputs(IMAGE, [Image.new("RGB", (width, height))])
        (size,) = wanted["image_sizes"].tolist()
        if min(size) < 28:
            with pytest.raises(ValueError, match=r"is scaled to \d+ x \d+ pixels; a token has 28"):
                family.fit(width, height, family.limits)
            continue
        fit = family.fit(width, height, family.limits)
        assert [*fit.size] == [1, *size]
        ids = wanted["input_ids"][0].tolist()
        assert (family.ids(fit.size).tolist(), fit.num_tokens) == (ids, len(ids))
        assert family.num_tokens(fit.size) == len(ids)


async def test_a_prompt_is_that_of_transformers(folder: Path, oracle: RowsReference) -> None:
    model = TextModel(folder, MAX_LEN, 262)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    messages = [user(text("Which?"), image(1), image(0), text(" Or?"), image(2))]
    found = await Tokenizer(model, reading).ask(*chat(messages, 3), *FILES)
    await reading.close()
    generate, (ids, _, *pixels) = found
    wanted = expected(oracle, messages, [PICTURES[number] for number in (1, 0, 2)])
    assert ids.tolist() == wanted["input_ids"][0].tolist()
    assert [[*item.size[1:]] for item in generate.items] == wanted["image_sizes"].tolist()
    for item, each, padded in zip(generate.items, pixels, wanted["pixel_values"], strict=True):
        _, height, width = item.size
        made = oracle.images(images=[each.reshape(height, width, 3)], return_tensors="pt")
        assert (made["pixel_values"][0] == padded[:, :height, :width]).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"patch_size": {"height": 14, "width": 16}}, "is no square"),
        ({"patch_size": 0}, "patch_size 0 is no square"),
        ({"do_resize": False}, "without do_resize"),
    ],
    ids=str,
)
def test_other_files_are_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=text):
        read_family(tmp_path)
