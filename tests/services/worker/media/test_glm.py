"""Images of GLM-4.1V, 4.5V and GLM-OCR: towers and texts against transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from benchmarks.harness.engines import make_engine
from services.worker.media.tower import Tower
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from tests.media.glm_checkpoints import KINDS, ROTATIONS, GlmReference, glm_reference, save_glm
from tests.media.pictures import picture
from tests.services.worker.checkpoints import change_config
from tests.services.worker.media.prompts import ON_HOSTS, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 512}
FIRST, SECOND = picture(1, 112, 84), picture(2, 112, 84)
WIDE = picture(3, 140, 28)


@pytest.fixture(scope="module", params=KINDS)
def glm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    save_glm(folder, kind=request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(glm: Path) -> GlmReference:
    return glm_reference(glm)


@pytest.fixture(scope="module")
def chats(oracle: GlmReference) -> list[Chat]:
    return [
        chat(oracle, "Describe it. ", FIRST, "In one word."),
        chat(oracle, "Describe it. ", SECOND, "In one word."),
        chat(oracle, FIRST, WIDE, "?"),
        chat(oracle, "No picture at all."),
    ]


@pytest.mark.parametrize("kernels", ON_HOSTS)
def test_texts_match_transformers(glm: Path, chats: list[Chat], kernels: str) -> None:
    first, second, both, _ = chats
    assert first.expected.prompt_ids == second.expected.prompt_ids
    assert first.expected.ids != second.expected.ids
    engine = make_engine(glm, kernels, **LIMITS)
    for chunk_size in (1, 7, 128):
        texts = texts_of(engine, chats, chunk_sizes=[chunk_size])
        assert texts == [each.expected.ids for each in chats]
    texts_of(engine, [both])
    one, other = both.items
    for num_cached in (one.start, one.start + 3, one.end, other.start + 2):
        (text,) = texts_of(engine, [both], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == both.expected.ids


def test_features_match_the_whole_model(glm: Path, oracle: GlmReference) -> None:
    inputs = oracle.images(images=[FIRST], return_tensors="pt")
    whole = AutoModelForImageTextToText.from_pretrained(glm, dtype=torch.float32).eval()
    with torch.inference_mode():
        (expected,) = whole.get_image_features(**inputs).pooler_output
    found = Tower(glm, torch.float32).features(np.asarray(FIRST)[None])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_an_mtp_head_is_left_out(glm: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((glm / "config.json").read_bytes())
    text = json.loads((glm / "config.json").read_text())["text_config"]
    change_config(tmp_path, text_config=text | {"num_nextn_predict_layers": 1})
    assert getattr(read_model_config(tmp_path), "num_nextn_predict_layers", 0) == 0


def test_a_section_has_the_rotated_frequencies(glm: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((glm / "config.json").read_bytes())
    text = json.loads((glm / "config.json").read_text())["text_config"]
    text["rope_parameters"] = ROTATIONS | {"mrope_section": [2, 3, 3]}
    change_config(tmp_path, text_config=text)
    with pytest.raises(ConfigError, match="the sum 4, half of the rotated part"):
        read_model_config(tmp_path)
