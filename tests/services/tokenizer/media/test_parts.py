"""Images of LFM2-VL: tiles, views and ids equal transformers'."""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ImageOps

from services.tokenizer.media.limits import with_detail
from services.tokenizer.media.reading import MediaReading, media_for
from services.tokenizer.text_model import TextModel
from shared.errors import ConfigError
from shared.media.families import read_family
from shared.media.family import PixelLimits
from shared.media.lfm2_vl import TilesAndView
from shared.settings.tokenizer import TokenizerConfig
from shared.wire.messages import Convert, Medium
from tests.media.checkpoints import MAX_LEN
from tests.media.lfm_checkpoints import PartsReference, parts_reference, save_lfm2
from tests.media.pictures import picture
from tests.services.tokenizer.media.files import file_of, open_file, with_orientation
from tests.services.tokenizer.media.test_requests import Tokenizer, chat, image, text, user

SIZES = [(1, 1), (100, 50), (33, 120), (32, 32), (200, 200), (16, 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lfm2")
    save_lfm2(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> PartsReference:
    return parts_reference(folder)


@pytest.fixture(scope="module")
def family(folder: Path) -> TilesAndView:
    found = read_family(folder)
    assert isinstance(found, TilesAndView)
    return found


@pytest.fixture
async def tokenizer(folder: Path) -> AsyncIterator[Tokenizer]:
    model = TextModel(folder, MAX_LEN, 300)
    reading = media_for(model, folder, TokenizerConfig(model=str(folder)))
    assert isinstance(reading, MediaReading)
    yield Tokenizer(model, reading)
    await reading.close()


def test_sizes_match_transformers(family: TilesAndView, oracle: PartsReference) -> None:
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(0, np.log(500), (1000, 2))).astype(int).tolist()
    nums = set()
    for width, height in [*SIZES, *sizes]:
        if max(width, height) > 200 * min(width, height):
            with pytest.raises(ValueError, match="one side may be 200 times the other"):
                family.parts(width, height, family.limits)
            continue
        parts = family.parts(width, height, family.limits)
        rows, columns, (across, down) = oracle.layout(width, height)
        assert (parts.rows, parts.columns, parts.view.size) == (rows, columns, (1, down, across))
        nums.add(rows * columns)
    assert nums == {0, 2, 3, 4}


def test_an_image_below_its_limit_has_a_view_alone(family: TilesAndView) -> None:
    for most in (16**2, 16**2 * 5):
        parts = family.parts(300, 200, PixelLimits(1, most))
        _, height, width = parts.view.size
        assert (parts.rows, len(parts.sizes)) == (0, 1)
        assert height * width <= most


def test_an_image_of_low_detail_has_a_view_alone(family: TilesAndView) -> None:
    low = with_detail(family.limits, "low")
    assert low.max_pixels == family.limits.max_pixels
    assert family.parts(300, 200, family.limits).rows > 0
    assert family.parts(300, 200, low).rows == 0


async def test_a_prompt_is_that_of_transformers(
    tokenizer: Tokenizer, oracle: PartsReference
) -> None:
    """Images that are turned by a quarter have the tiles of the upright ones."""
    files = [file_of(picture(seed, *size)) for seed, size in enumerate(SIZES)]
    files += [with_orientation(number) for number in (1, 3, 6, 8)]
    messages = [user(text("Which?"), *map(image, range(len(files))))]
    asked, prompt, nothing = chat(messages, len(files))
    generate, (ids, _, *pixels) = await tokenizer.ask(asked, prompt, nothing, *files)
    pictures = [ImageOps.exif_transpose(open_file(file)) for file in files]
    written = oracle.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ids.tolist() == oracle.inputs(written, pictures)["input_ids"][0].tolist()
    expected = [frame for each in pictures for (frame,) in oracle.items(each.convert("RGB"))]
    found = dict(zip(dict.fromkeys(item.digest for item in generate.items), pixels, strict=True))
    for item, frame in zip(generate.items, expected, strict=True):
        assert item.size == (1, frame.height, frame.width)
        assert found[item.digest].tobytes() == frame.tobytes()
    upright = Convert("c", "chat", False, media=[Medium()] * len(SIZES))
    few, prompt, _ = chat([user(*map(image, range(len(SIZES))))], len(SIZES))
    _, (whole, *_) = await tokenizer.ask(few, prompt, nothing, *files[: len(SIZES)])
    counted = await tokenizer.convert(upright, prompt, *files[: len(SIZES)])
    assert counted.tolist() == whole.tolist()


async def test_a_replay_as_ids_is_the_same_prompt(tokenizer: Tokenizer) -> None:
    files = [file_of(picture(seed, 100, 50)) for seed in range(2)]
    generate, (ids, _, *pixels) = await tokenizer.ask(
        *chat([user(image(1), text("or"), image(0))], 2), *files
    )
    again, _, nothing = chat([], 2, kind="ids")
    replay, (same, _, *others) = await tokenizer.ask(again, ids, nothing, *files[::-1])
    assert (replay.items, same.tolist()) == (generate.items, ids.tolist())
    assert [each.tobytes() for each in others] == [each.tobytes() for each in pixels]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 3}, "resample 2"),
        ({"min_tiles": 1}, "min_tiles is 1 and max_tiles 4; they may be 2 to 64"),
        ({"max_tiles": 65}, "max_tiles 65"),
        ({"use_thumbnail": False}, "with use_thumbnail"),
        ({"tile_size": 40}, "tile_size is 40; a token has 16 pixels"),
        ({"tile_size": 64}, "tile_size is 64; a token has 16 pixels, an image 6 tokens"),
        ({"max_image_tokens": 1}, "min_image_tokens is 2 and max_image_tokens 1"),
        ({"downsample_factor": 1}, "downsample_factor is 1; the tower takes 2"),
    ],
    ids=str,
)
def test_other_ways_to_cut_are_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=text):
        read_family(tmp_path)
