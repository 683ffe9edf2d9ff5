"""Folders of files: their names and places, and their owners."""

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.gguf.folder import TENSORS_FILE, find
from shared.model_folder import weight_files
from shared.model_location import locate_model
from tests.shared.gguf.test_bad_files import save

BLOB = f"sha256-{'0123abcd' * 8}"


@pytest.mark.parametrize(
    ("given", "name"),
    [("Some Model", "Some Model"), ("", BLOB), ("two\nlines", BLOB), ("x" * 257, BLOB)],
)
def test_a_file_of_any_name(tmp_path: Path, given: str, name: str) -> None:
    """As in the folder of ollama's blobs."""
    path = save(tmp_path / BLOB, lambda writer: writer.add_name(given))
    location = locate_model(str(path))
    assert location.name == name
    (link,) = weight_files(location.folder)
    assert link.resolve() == path
    entries = json.loads((location.folder / TENSORS_FILE).read_text())
    assert {each[1] for each in entries} == {link.name} == {f"{BLOB}.gguf"}


def test_another_file_is_none_of_its(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"GGU")
    assert find(path) is None
    with pytest.raises(ConfigError, match="give a Hugging Face model folder"):
        locate_model(str(path))
