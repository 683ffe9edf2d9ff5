"""Images of InternVL and Qianfan-OCR, which are cut into tiles: towers and texts against
transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.harness.engines import make_engine
from services.worker.media.tower import Sizes, Tower
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from tests.media.internvl_checkpoints import (
    KINDS,
    SIDE,
    TilesReference,
    save_internvl,
    save_qianfan,
    tiles_reference,
)
from tests.media.pictures import picture
from tests.services.worker.checkpoints import change_config
from tests.services.worker.media.prompts import ON_HOSTS, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
FIRST, SECOND = picture(1, 2 * SIDE, SIDE), picture(2, 2 * SIDE, SIDE)
SMALL = picture(3, SIDE, SIDE)


@pytest.fixture(scope="module", params=[*KINDS, "qianfan"])
def tiles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiles")
    if request.param == "qianfan":
        save_qianfan(folder)
    else:
        save_internvl(folder, kind=request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(tiles: Path) -> TilesReference:
    return tiles_reference(tiles)


@pytest.fixture(scope="module")
def chats(oracle: TilesReference) -> list[Chat]:
    return [
        chat(oracle, "Describe it. ", FIRST, "In one word."),
        chat(oracle, "Describe it. ", SECOND, "In one word."),
        chat(oracle, FIRST, SMALL, "?"),
        chat(oracle, "No picture at all."),
    ]


@pytest.mark.parametrize("kernels", ON_HOSTS)
def test_texts_match_transformers(tiles: Path, chats: list[Chat], kernels: str) -> None:
    first, second, both, _ = chats
    assert first.expected.prompt_ids == second.expected.prompt_ids
    assert first.expected.ids != second.expected.ids
    engine = make_engine(tiles, kernels, **LIMITS)
    for chunk_size in (1, 7, 128):
        texts = texts_of(engine, chats, chunk_sizes=[chunk_size])
        assert texts == [each.expected.ids for each in chats]
    texts_of(engine, [both])
    one, other = both.items
    for num_cached in (one.start, one.start + 3, one.end - 1, other.start, other.start + 4):
        (text,) = texts_of(engine, [both], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == both.expected.ids


def test_features_match_the_whole_model(tiles: Path, oracle: TilesReference) -> None:
    inputs = oracle.tiles_of([FIRST])
    del inputs["num_patches"]
    whole = AutoModelForImageTextToText.from_pretrained(tiles, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = whole.get_image_features(**inputs).pooler_output.flatten(0, 1)
    tower = Tower(tiles, torch.float32)
    found = tower.features(np.stack([np.asarray(tile) for tile in oracle.frames(FIRST)]))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    sizes = Sizes(tiles, torch.float32)
    assert (sizes.pixels_of_patch, sizes.patches_of_token) == (14**2, 4)


def test_other_models_of_texts_are_refused(tiles: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiles / "config.json").read_bytes())
    text = {"model_type": "llama", "vocab_size": 260, "max_position_embeddings": 512}
    change_config(tmp_path, text_config=text | {"rms_norm_eps": 1e-5})
    with pytest.raises(ConfigError, match="llama"):
        read_model_config(tmp_path)
