"""Images of Mistral 3 and Pixtral, which have texts between their features, and LightOnOCR: towers
and texts against transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from benchmarks.harness.engines import make_engine
from services.worker.media.preprocessors import read_preprocessor
from services.worker.media.tower import Sizes, Tower
from services.worker.models.registry import read_model_config
from shared.errors import ConfigError
from shared.media.families import read_family
from tests.media.llava_checkpoints import (
    RowsReference,
    UnbrokenReference,
    rows_reference,
    save_lighton,
    save_mistral3,
    save_pixtral,
)
from tests.media.pictures import picture
from tests.services.worker.checkpoints import change_config
from tests.services.worker.media import scheduled
from tests.services.worker.media.prompts import GREEDY, ON_HOSTS, Chat, chat, texts_of

LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 6, "max_num_batched_tokens": 1024}
FIRST, SECOND = picture(1, 84, 140), picture(2, 84, 140)
WIDE = picture(3, 196, 56)
SIZES = [(28, 56), (84, 140), (224, 28), (168, 196)]


@pytest.fixture(
    scope="module",
    params=[save_mistral3, pytest.param(save_pixtral, marks=pytest.mark.slow), save_lighton],
)
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    request.param(folder)
    return folder


@pytest.fixture(scope="module")
def oracle(rows: Path) -> RowsReference:
    return rows_reference(rows)


@pytest.fixture(scope="module")
def chats(oracle: RowsReference) -> dict[str, Chat]:
    return {
        "first": chat(oracle, "Describe it. ", FIRST, "In one word."),
        "second": chat(oracle, "Describe it. ", SECOND, "In one word."),
        "image alone": chat(oracle, WIDE),
        "two": chat(oracle, FIRST, " and ", WIDE, ": which is wider?"),
        "side by side": chat(oracle, SECOND, FIRST),
        "none": chat(oracle, "No picture at all."),
    }


@pytest.fixture(scope="module", params=ON_HOSTS)
def engine(request: pytest.FixtureRequest, rows: Path) -> Any:
    return make_engine(rows, request.param, **LIMITS)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
def test_texts_match_transformers(engine: Any, chats: dict[str, Chat], chunk_size: int) -> None:
    for name in ("image alone", "two"):
        (text,) = texts_of(engine, [chats[name]], chunk_sizes=[chunk_size])
        assert text == chats[name].expected.ids, name
    together = texts_of(engine, [*chats.values()], chunk_sizes=[3 * chunk_size], num_steps=3)
    assert together == [each.expected.ids for each in chats.values()]


def test_texts_differ_by_the_picture_alone(chats: dict[str, Chat]) -> None:
    first, second = chats["first"].expected, chats["second"].expected
    assert first.prompt_ids == second.prompt_ids
    assert first.ids != second.ids


def test_a_cache_of_prefixes_may_end_anywhere(engine: Any, chats: dict[str, Chat]) -> None:
    """Before and behind a break too, and behind the features of an item."""
    found = chats["two"]
    first, second = found.items
    texts_of(engine, [found])
    for num_cached in (
        *range(first.start, first.start + 6),
        first.end - 1,
        first.end,
        second.start + 9,
        second.end,
    ):
        (text,) = texts_of(engine, [found], num_cached=num_cached, chunk_sizes=[1000, 5])
        assert text == found.expected.ids, num_cached


def test_the_engine_for_gpus_writes_the_same_texts(rows: Path, chats: dict[str, Chat]) -> None:
    made = make_engine(rows, "device", **LIMITS)
    wanted = [*chats.values()] * 2
    found = scheduled.run(made, wanted, [GREEDY] * len(wanted))
    assert found.texts == [each.expected.ids for each in wanted]
    assert found.num_hits > 0


@pytest.mark.parametrize("size", SIZES)
def test_features_match_the_whole_model(
    rows: Path, oracle: RowsReference, size: tuple[int, int]
) -> None:
    image = picture(5, *size)
    inputs = oracle.images(images=[image], return_tensors="pt")
    ours = read_preprocessor(rows)
    found = ours.inputs(np.asarray(image)[None], ours.values)
    assert found.keys() == inputs.keys()
    for name, values in inputs.items():
        np.testing.assert_array_equal(found[name], values)
    whole = AutoModelForImageTextToText.from_pretrained(rows, dtype=torch.float32).eval()
    with torch.inference_mode():
        (expected,) = whole.get_image_features(**inputs).pooler_output
    tower = Tower(rows, torch.float32)
    torch.testing.assert_close(tower.features(np.asarray(image)[None]), expected, rtol=0, atol=0)
    held = [*tower.model.parameters(), *tower.model.buffers()]
    sizes = Sizes(rows, torch.float32)
    assert sizes.weights == sum(each.nbytes for each in held)
    side = oracle.side
    assert (sizes.pixels_of_patch, sizes.patches_of_token) == (14**2, (side // 14) ** 2)


def test_an_image_of_one_token_is_computed(rows: Path, oracle: RowsReference) -> None:
    """transformers computes one of Mistral 3 beside another image alone."""
    side = oracle.side
    images = [picture(number, side, side) for number in (5, 6)]
    inputs = oracle.images(images=images, return_tensors="pt")
    with torch.inference_mode():
        expected, _ = oracle.model.get_image_features(**inputs).pooler_output
    found = Tower(rows, torch.float32).features(np.asarray(images[0])[None])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_missing_tensors_of_a_tower_are_named(rows: Path, tmp_path: Path) -> None:
    shutil.copytree(rows, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    endings = ".ln_pre.weight", ".linear_1.weight"
    found = {name: tensors[name] for name in tensors if not name.endswith(endings)}
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    assert len(found) == len(tensors) - 2
    with pytest.raises(ConfigError, match=r"lacks 2 tensors.*r\.(linear_1|ln_pre)"):
        Tower(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"do_resize": False}, "without do_resize"),
        ({"do_center_crop": True}, "with do_center_crop"),
        ({"resample": 2}, "resample 2 is not supported"),
        ({"size": {"height": 224, "width": 224}}, "size has no longest_edge"),
    ],
    ids=str,
)
def test_other_ways_to_scale_are_refused(
    rows: Path, tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    shutil.copytree(rows, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=text):
        read_family(tmp_path)


def test_a_tokenizer_without_breaks_is_refused(
    rows: Path, oracle: RowsReference, tmp_path: Path
) -> None:
    """LightOnOCR needs none."""
    shutil.copytree(rows, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(path.read_text().replace("[IMG_BREAK]", "[BREAK]"))
    if isinstance(oracle, UnbrokenReference):
        assert read_family(tmp_path) is not None
        return
    with pytest.raises(ConfigError, match=r"no added token \[IMG_BREAK\]"):
        read_family(tmp_path)


def test_other_models_of_texts_are_not_ours(rows: Path, tmp_path: Path) -> None:
    shutil.copytree(rows, tmp_path, dirs_exist_ok=True)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    change_config(tmp_path, text_config=text | {"model_type": "ministral3"})
    with pytest.raises(ConfigError, match="Ministral3ForCausalLM is not supported"):
        read_model_config(tmp_path)


def test_pixtral_has_all_features_of_its_tower(tmp_path: Path) -> None:
    save_pixtral(tmp_path)
    change_config(tmp_path, vision_feature_select_strategy="default")
    with pytest.raises(ConfigError, match="'default' is not for Pixtral; only 'full' is"):
        read_family(tmp_path)
