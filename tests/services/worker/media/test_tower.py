"""The tower against the whole model of transformers, to the bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from services.worker.media.preprocessors import read_preprocessor
from services.worker.media.tower import Sizes, Tower
from shared.errors import ConfigError
from shared.media.families import read_family
from tests.media.checkpoints import preprocessor, save_checkpoint
from tests.media.families import FAMILIES
from tests.media.pictures import picture
from tests.media.references import Reference, reference

FLAT = ("qwen2.5-vl", "paddleocr-vl")  # in older configs
SIZES = [(2, 2), (3, 5), (10, 1), (9, 7)]  # in squares


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vl")
    save_checkpoint(folder, family=request.param)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Reference:
    return reference(folder)


def pixels_of(image: Image.Image) -> np.ndarray:
    return np.asarray(image)[None]


@pytest.fixture(scope="module")
def tower(folder: Path) -> Tower:
    return Tower(folder, torch.float32)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("size", SIZES)
def test_patches_match_transformers(folder: Path, oracle: Reference, size: tuple[int, int]) -> None:
    image = oracle.picture(3, *size)
    expected = oracle.images(images=[image], return_tensors="np")
    ours = read_preprocessor(folder)
    found = ours.inputs(np.asarray(image)[None], ours.values)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("size", SIZES)
def test_features_match_the_whole_model(
    tower: Tower, whole: Any, oracle: Reference, size: tuple[int, int]
) -> None:
    image = oracle.picture(5, *size)
    inputs = oracle.images(images=[image], return_tensors="pt")
    with torch.inference_mode():
        made = whole.get_image_features(**inputs)
    parts = made.pooler_output, *getattr(made, "deepstack_features", ())
    expected = torch.cat([part for (part,) in parts], 1)
    found = tower.features(pixels_of(image))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_tower_has_no_part_of_the_text_model(folder: Path, tower: Tower) -> None:
    names = [name for name, _ in tower.model.named_parameters()]
    assert names
    towers, projectors = {"visual", "vision_tower"}, {"projector", "resampler_model"}
    assert {name.split(".")[0] for name in names} <= towers | projectors
    held = [*tower.model.parameters(), *tower.model.buffers()]
    assert Sizes(folder, torch.float32).weights == sum(each.nbytes for each in held)


def test_a_random_tower_needs_no_weights(folder: Path, oracle: Reference, tmp_path: Path) -> None:
    preprocessor(folder, tmp_path)
    made = Tower(tmp_path, torch.bfloat16, is_dummy=True)
    family = read_family(folder)
    assert family is not None
    found = made.features(pixels_of(oracle.picture(0, 3, 2)))
    assert (found.shape, found.dtype) == ((6, 64 * family.num_embeddings), torch.bfloat16)


def test_missing_tensors_of_a_tower_are_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    prefixes = (
        "visual.",
        "model.visual.",
        "mlp_AR.",
        "model.vision_model.",
        "model.resampler_model.",
    )
    of_tower = [name for name in tensors if name.startswith(prefixes)]
    for name in (min(of_tower), max(of_tower)):
        rest = {each: tensor for each, tensor in tensors.items() if each != name}
        save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
        ending = name.removeprefix("model.").partition(".")[2]  # the beginning is transformers'
        with pytest.raises(ConfigError, match=rf"lacks 1 tensors.*{ending}.*language-model-only"):
            Tower(tmp_path, torch.float32)


@pytest.mark.parametrize("folder", FLAT, indirect=True)
def test_a_config_without_a_part_for_texts_is_read(
    folder: Path, tower: Tower, tmp_path: Path
) -> None:
    """As published, with a size that the tower does not have."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= config.pop("text_config") | {"model_type": config["model_type"]}
    config["vision_config"] |= {"model_type": config["model_type"]}
    config["vision_config"] |= {"temporal_patch_size": 2, "tokens_per_second": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    pixels = pixels_of(picture(8, 84, 140))
    found = Tower(tmp_path, torch.float32).features(pixels)
    torch.testing.assert_close(found, tower.features(pixels), rtol=0, atol=0)


def test_other_pixels_and_patches_are_refused(folder: Path, tmp_path: Path) -> None:
    """Also patches that the tower does not take."""
    for name, value in (
        ("do_normalize", False),
        ("do_rescale", False),
        ("patch_size", 15),
        ("merge_size", 4),
        ("temporal_patch_size", 3),
    ):
        preprocessor(folder, tmp_path, **{name: value})
        with pytest.raises(ConfigError, match=rf"preprocessor_config\.json: .*{name}"):
            read_preprocessor(tmp_path)
