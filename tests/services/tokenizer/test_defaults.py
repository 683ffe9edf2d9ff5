import json
from pathlib import Path

import pytest

from services.tokenizer.service import read_defaults
from shared.errors import ConfigError
from shared.wire.messages import SamplingDefaults


def folder_with(path: Path, **values: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_the_models_own_file_counts_unless_another_or_none_is_chosen(tmp_path: Path):
    model = folder_with(tmp_path / "model", temperature=0.6, top_k=20, top_p=0.95, eos_token_id=2)
    other = folder_with(
        tmp_path / "other", min_p=0.1, repetition_penalty=1.05, top_n_sigma=2, max_new_tokens=7
    )
    assert read_defaults(model, "auto", {}) == (SamplingDefaults(0.6, 20, 0.95), None)
    assert read_defaults(model, "none", {}) == (SamplingDefaults(), None)
    assert read_defaults(model, str(other), {}) == (SamplingDefaults(1, 0, 1, 0.1, 1.05, 2), 7)


def test_a_folder_without_the_file_means_openais_defaults(tmp_path: Path):
    assert read_defaults(tmp_path, "auto", {}) == (SamplingDefaults(), None)


def test_a_wrong_folder_and_a_wrong_value_are_settings_errors(tmp_path: Path):
    with pytest.raises(ConfigError, match="generation-config: nowhere"):
        read_defaults(tmp_path, "nowhere", {})
    with pytest.raises(ConfigError, match=r"top_p"):
        read_defaults(folder_with(tmp_path, top_p=1.5), "auto", {})


def test_a_setting_comes_before_the_file(tmp_path: Path):
    model = folder_with(tmp_path / "model", temperature=0.6, top_k=20, max_new_tokens=7)
    override = {"temperature": 0.2, "max_new_tokens": 3}
    assert read_defaults(model, "auto", override) == (SamplingDefaults(0.2, 20), 3)
    assert read_defaults(model, "none", {"top_p": 0.5}) == (SamplingDefaults(top_p=0.5), None)


@pytest.mark.parametrize("override", [{"top_p": 1.5}, {"temprature": 0.5}, {"top_k": "a"}])
def test_a_wrong_setting_is_an_error_that_names_it(tmp_path: Path, override: dict[str, object]):
    with pytest.raises(ConfigError, match=f"^override-generation-config: .*{next(iter(override))}"):
        read_defaults(tmp_path, "auto", override)
