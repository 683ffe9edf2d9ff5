"""Folders of files: their names and places, and their owners."""

import json
import os
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.formats.gguf.folder import TENSORS_FILE, find, folder_of
from shared.model_folder import weight_files
from shared.model_location import locate_model
from tests.shared.formats.gguf.test_bad_files import save

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
    with pytest.raises(ConfigError, match="is a file; give its folder"):
        locate_model(str(path))


def make(directory: Path, text: str) -> Path:
    """The folder of a file in ``directory`` with ``text`` in its metadata."""
    directory.mkdir(exist_ok=True)
    return folder_of(save(directory / "model.gguf", lambda writer: writer.add_name(text)))


def test_a_replaced_file_leaves_no_folder(tmp_path: Path) -> None:
    other = make(tmp_path / "other", "first")
    root = other.parent
    (root / f"model-{'0' * 16}").mkdir()  # of no file
    folders = [make(tmp_path / "one", text) for text in ("first", "second", "third")]
    assert len({*folders}) == 3
    assert {*root.iterdir()} == {other, folders[-1], root / f"model-{'0' * 16}"}
    for each in (root.parent, root, other):
        assert each.stat().st_mode & 0o777 == 0o700


def test_links_to_folders_of_replaced_files_are_left(tmp_path: Path) -> None:
    first = make(tmp_path, "first")
    moved = first.rename(tmp_path / "moved")
    first.symlink_to(moved)
    second = make(tmp_path, "second")
    assert {*second.parent.iterdir()} == {first, second}
    assert weight_files(moved)


def in_cache(folder: Path) -> dict[str, Path]:
    return {"folder": folder, "root": folder.parent, "parent": folder.parent.parent}


places = pytest.mark.parametrize("place", ["folder", "root", "parent"])


@places
def test_folders_of_another_user_are_refused(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path, "first")
    wrong = in_cache(folder)[place]
    if os.getuid() == 0:
        os.chown(wrong, 1234, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 1234)
        wrong = folder.parent.parent
    with pytest.raises(ConfigError, match=f"{wrong} is of user .*XDG_CACHE_HOME names another"):
        folder_of(tmp_path / "model.gguf")


@pytest.mark.skipif(os.getuid() != 0, reason="the folders belong to root")
def test_folders_of_root_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path, "first")
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert folder_of(tmp_path / "model.gguf") == folder


@places
def test_links_are_refused(tmp_path: Path, place: str) -> None:
    link = in_cache(make(tmp_path, "first"))[place]
    link.rename(tmp_path / "moved")
    link.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match=f"{link} is a link, or not a folder"):
        folder_of(tmp_path / "model.gguf")
