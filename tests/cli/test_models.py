"""`shoal models` lists the models on this machine, with a reason if one cannot be served."""

import json
from pathlib import Path

import pytest

from cli.models.command import COUNTS, SIZES, main, rounded
from shared.model_folder import EMBEDDED_MODEL, weight_files
from tests.shared.hub_cache import add_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "models"


def add(folder: Path, name: str, has_weights: bool = True, **changes: object) -> None:
    """The embedded model with another config."""
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text()) | changes
    at = folder / name
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(config))
    index = EMBEDDED_MODEL / "model.safetensors.index.json"
    for file in [*weight_files(EMBEDDED_MODEL), index] if has_weights else []:
        (at / file.name).symlink_to(file)


def listed(capsys, *arguments: str) -> dict[str, dict]:
    main([*arguments, "--json"])
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


def test_models_of_a_folder_and_why_they_cannot_be_served(folder: Path, capsys):
    add(folder, "good")
    add(folder, "half", has_weights=False)
    add(folder, "other", hidden_act="gelu")
    add(folder, "packed", quantization_config={"quant_method": "zip"})
    found = listed(capsys, str(folder))
    good = found.pop("good")
    assert (good["can_serve"], good["backend"], good["runner"]) == (True, "shoal", "generate")
    assert good["parameters"] == 7_741_440
    assert good["size_bytes"] == sum(file.stat().st_size for file in weight_files(EMBEDDED_MODEL))
    assert not any(each["can_serve"] for each in found.values())
    assert found["half"]["reason"] == "has no file model.safetensors"
    assert "hidden_act 'gelu'" in found["other"]["reason"]
    assert "quant_method 'zip' is not supported" in found["packed"]["reason"]


@pytest.mark.slow  # imports transformers
def test_an_unknown_architecture_is_not_served(folder: Path, capsys):
    add(folder, "strange", architectures=["FishForCausalLM"], model_type="fish")
    found = listed(capsys, str(folder))
    assert "FishForCausalLM is none of our own" in found["strange"]["reason"]


def test_a_folder_without_models_is_said_to_have_none(tmp_path: Path, capsys):
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().out == f"no model in {tmp_path}\n"


def test_sizes_have_the_unit_that_suits_them():
    sizes = {0: "0 B", 900: "900 B", 5000: "4.9 KiB", 15 << 20: "15.0 MiB", 3 << 29: "1.5 GiB"}
    assert {num: rounded(num, SIZES) for num in sizes} == sizes
    counts = {12_345: "12.3K", 7_741_440: "7.7M", 70_600_000_000: "70.6B"}
    assert {num: rounded(num, COUNTS) for num in counts} == counts


def test_exit_codes_and_the_table(folder: Path, capsys):
    add(folder, "half[b]", has_weights=False)
    assert main([str(folder)]) == 1
    printed = capsys.readouterr().out
    assert "no: has no file" in printed
    assert "half[b]" in printed, "no name is markup"
    assert main([str(EMBEDDED_MODEL)]) == 0
    assert "7.7M" in capsys.readouterr().out
    assert main([str(folder / "nowhere")]) == 2


def test_the_hugging_face_cache_is_looked_through(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    files = [
        EMBEDDED_MODEL / "config.json",
        EMBEDDED_MODEL / "model.safetensors.index.json",
        *weight_files(EMBEDDED_MODEL),
    ]
    add_model(tmp_path, "org/fish", files=files)
    found = listed(capsys)
    assert set(found) == {EMBEDDED_MODEL.name, "org/fish"}
    assert found["org/fish"]["can_serve"]
