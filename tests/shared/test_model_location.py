"""From the setting ``model`` to a folder: the folder itself, or a snapshot in a cache."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL, read_model_info
from shared.model_location import ModelLocation, locate_model
from tests.shared.hub_cache import COMMIT, OTHER_COMMIT, add_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library has read its environment at import."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_folder_is_itself_and_named_as_it_is(tmp_path: Path, monkeypatch) -> None:
    assert locate_model(str(EMBEDDED_MODEL)) == ModelLocation("shoal-tiny", EMBEDDED_MODEL)
    monkeypatch.chdir(tmp_path)
    assert locate_model("shoal-tiny") == ModelLocation("shoal-tiny", EMBEDDED_MODEL)
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path / "tiny")
    with pytest.raises(ConfigError, match=r"model: \. has no file config\.json"):
        locate_model(".")
    (tmp_path / "tiny" / "config.json").touch()
    assert locate_model(".").name == "tiny"


def test_a_name_is_its_snapshot_in_the_cache(cache: Path) -> None:
    snapshot = add_model(cache, "org/name")
    assert locate_model("org/name") == ModelLocation("org/name", snapshot)
    assert locate_model("org/name@main") == ModelLocation("org/name", snapshot)
    alone = add_model(cache, "name")
    assert locate_model("name") == ModelLocation("name", alone)


def test_a_revision_is_a_branch_or_a_whole_hash(cache: Path) -> None:
    first = add_model(cache, "org/name")
    second = add_model(cache, "org/name", "refs/pr/1", OTHER_COMMIT)
    for revision, snapshot in (
        ("refs/pr/1", second),
        (OTHER_COMMIT, second),
        (COMMIT, first),
    ):
        assert locate_model(f"org/name@{revision}") == ModelLocation("org/name", snapshot)


@pytest.mark.parametrize("revision", [COMMIT[:8], "no-such-branch"])
def test_a_revision_that_is_not_in_the_cache_is_named(cache: Path, revision: str) -> None:
    add_model(cache, "org/name")
    with pytest.raises(ConfigError, match=f"`hf download org/name --revision {revision}`"):
        locate_model(f"org/name@{revision}")


def test_a_folder_wins_over_the_cache(cache: Path, tmp_path: Path, monkeypatch) -> None:
    add_model(cache, "org/name")
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    assert locate_model("org/name") == ModelLocation("name", Path("org/name"))


@pytest.mark.parametrize("name", ["org/name", "name", "a--b", "name.git"])
def test_a_name_that_is_neither_folder_nor_in_the_cache_is_an_error_with_a_remedy(
    cache: Path, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"model: no such folder: {name}, ") as caught:
        locate_model(name)
    assert f"cache {cache}; `hf download {name}`" in str(caught.value)


@pytest.mark.parametrize("path", ["/no/such", "./such", "../such", "a/b/c", "~/such", "a@"])
def test_a_path_that_can_be_no_name_is_no_such_folder(cache: Path, path: str) -> None:
    with pytest.raises(ConfigError, match=f"model: no such folder: {path}; give"):
        locate_model(path)


def test_a_file_in_no_known_format_is_refused_by_name(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.touch()
    with pytest.raises(ConfigError, match=f"^model: {weights} is a file; give its folder, or a "):
        locate_model(str(weights))


def list_files(cache: Path, snapshot: Path, *lacking: str) -> None:
    """The library's record of a repository, downloaded completely or in part."""
    names = [file.name for file in snapshot.iterdir()] + list(lacking)
    listing = {"format_version": 1, "files": {name: {"size": 1, "blob_id": "x"} for name in names}}
    path = cache / "models--org--name" / "trees" / f"{snapshot.name}.json"
    path.parent.mkdir()
    path.write_text(json.dumps(listing))


def test_a_snapshot_may_lack_files_that_are_never_read(cache: Path) -> None:
    snapshot = add_model(cache, "org/name")
    list_files(cache, snapshot, "README.md", "pytorch_model.bin", "onnx/config.json")
    assert locate_model("org/name").folder == snapshot


def test_a_snapshot_that_lacks_a_chat_template_is_refused(cache: Path) -> None:
    pytest.importorskip("huggingface_hub._tree_cache", reason="older ones note no files")
    list_files(cache, add_model(cache, "org/name"), "chat_template.jinja")
    with pytest.raises(ConfigError, match="no complete snapshot"):
        locate_model("org/name")


def test_the_fingerprint_of_a_snapshot_is_the_folders(cache: Path) -> None:
    folder = add_model(cache, "org/name", files=EMBEDDED_MODEL.iterdir())
    assert all(file.is_symlink() for file in folder.iterdir())
    linked, plain = (read_model_info(each, [], None) for each in (folder, EMBEDDED_MODEL))
    assert linked.fingerprint == plain.fingerprint


@pytest.fixture
def read_only_cache(cache: Path) -> Iterator[Path]:
    add_model(cache, "org/name")
    folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield cache
    for folder in folders:
        folder.chmod(0o755)


def test_a_cache_is_only_read(read_only_cache: Path, monkeypatch) -> None:
    """Not even a temporary file is made, visible in folders' times. Root may write anywhere."""
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it asks the network"))
    before = {path: path.lstat().st_mtime_ns for path in read_only_cache.rglob("*")}
    locate_model("org/name")
    with pytest.raises(ConfigError):
        locate_model("org/other")
    assert {path: path.lstat().st_mtime_ns for path in read_only_cache.rglob("*")} == before


def run(code: str, **environment: str) -> str:
    """The output of a new process, which imports the library anew or not at all."""
    command = [sys.executable, "-c", f"import sys\nfrom shared.model_location import *\n{code}"]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | environment
    )
    return done.stdout.strip()


def test_the_library_is_imported_for_names_alone() -> None:
    code = f"locate_model({str(EMBEDDED_MODEL)!r}); print('huggingface_hub' in sys.modules)"
    assert run(code) == "False"


@pytest.mark.parametrize(("variable", "folder"), [("HF_HOME", "."), ("HF_HUB_CACHE", "hub")])
def test_the_cache_is_where_the_librarys_environment_puts_it(
    tmp_path: Path, monkeypatch, variable: str, folder: str
) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshot = add_model(tmp_path / "hub", "org/name")
    code = "print(locate_model('org/name').folder)"
    assert run(code, **{variable: str(tmp_path / folder)}) == str(snapshot)
