"""Images of LLaVA 1.5: towers and texts against transformers."""

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
from tests.media.llava_checkpoints import SquareReference, save_llava, square_reference
from tests.media.pictures import picture
from tests.services.worker.checkpoints import change_config
from tests.services.worker.media.prompts import KERNELS, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
FIRST, SECOND = picture(1, 56, 56), picture(2, 56, 56)


@pytest.fixture(scope="module", params=["default", "full"])
def square(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save_llava(folder, strategy=request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(square: Path) -> SquareReference:
    return square_reference(square)


@pytest.fixture(scope="module")
def chats(oracle: SquareReference) -> list[Chat]:
    return [
        chat(oracle, "Describe it. ", FIRST, "In one word."),
        chat(oracle, "Describe it. ", SECOND, "In one word."),
        chat(oracle, FIRST, SECOND, "?"),
        chat(oracle, "No picture at all."),
    ]


@pytest.mark.parametrize("kernels", KERNELS)
def test_texts_match_transformers(square: Path, chats: list[Chat], kernels: str) -> None:
    first, second, both, _ = chats
    assert first.expected.prompt_ids == second.expected.prompt_ids
    assert first.expected.ids != second.expected.ids
    engine = make_engine(square, kernels, **LIMITS)
    for chunk_size in (7, 128):
        texts = texts_of(engine, chats, chunk_sizes=[chunk_size])
        assert texts == [each.expected.ids for each in chats]
    texts_of(engine, [both])
    for num_cached in (both.items[0].start + 3, both.items[1].start, both.items[1].start + 9):
        (text,) = texts_of(engine, [both], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == both.expected.ids


def test_features_match_the_whole_model(square: Path, oracle: SquareReference) -> None:
    inputs = oracle.images(images=[FIRST], return_tensors="pt")
    whole = AutoModelForImageTextToText.from_pretrained(square, dtype=torch.float32).eval()
    with torch.inference_mode():
        (expected,) = whole.get_image_features(**inputs).pooler_output
    tower = Tower(square, torch.float32)
    torch.testing.assert_close(tower.features(np.asarray(FIRST)[None]), expected, rtol=0, atol=0)
    sizes = Sizes(square, torch.float32)
    assert (sizes.pixels_of_patch, sizes.patches_of_token) == (14**2, 1)


def test_other_models_of_texts_are_refused(square: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((square / "config.json").read_bytes())
    text = {"model_type": "phi", "vocab_size": 260, "max_position_embeddings": 512}
    change_config(tmp_path, text_config=text | {"rms_norm_eps": 1e-5})
    with pytest.raises(ConfigError, match="phi"):
        read_model_config(tmp_path)
