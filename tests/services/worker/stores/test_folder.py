"""Owners of stores, and who may see them."""

import os
from pathlib import Path

import msgspec
import pytest

from services.worker.stores import folder as folders
from services.worker.stores.folder import (
    BLOCKS,
    FORMAT,
    HEADER,
    Header,
    claim,
    is_memory,
    make_private,
    ownerless_bytes,
    read_location,
    remove_ownerless,
)
from shared.errors import ConfigError

SIZE = 64 << 10


def fill(folder: Path, age: int = 0) -> None:
    path = folder / BLOCKS
    path.write_bytes(bytes(range(256)) * (SIZE // 256))
    (folder / HEADER).write_bytes(msgspec.json.encode(Header(FORMAT, "layout", "s", 1, SIZE)))
    os.utime(path, (1000 - age, 1000 - age))


def test_each_worker_has_a_store_and_the_next_one_that_of_a_lost_worker(tmp_path: Path) -> None:
    claims = [claim(tmp_path) for _ in range(3)]
    assert [folder.name for folder, _ in claims] == ["0", "1", "2"]
    os.close(claims[1][1])
    again, _ = claim(tmp_path)
    assert again.name == "1"
    assert claim(tmp_path)[0].name == "3"


def test_no_more_stores_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_STORES", 1)
    _, lock = claim(tmp_path)
    with pytest.raises(ConfigError, match=r"kv-offloading-dir: .* has 1 stores of running"):
        claim(tmp_path)
    os.close(lock)


def test_folders_are_made_for_this_user(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    make_private(tmp_path / "a" / "b")


def test_folders_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir(0o755)
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "open")
    make_private(tmp_path / "open", forbidden=0o022)
    for name, why in {
        "open": "open has mode 755, and is open to other users; make it 700",
        "file": "file is a link, or not a folder",
        "link": "link is a link, or not a folder",
        "file/in": "Not a directory",
    }.items():
        with pytest.raises(ConfigError, match=f"^kv-offloading-dir: .*{why}"):
            make_private(tmp_path / name)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=f"is of user {uid}, and this is user {uid + 1}"):
        make_private(tmp_path / "open")


def test_a_location_has_one_id(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    found = read_location(tmp_path / "a")
    assert len(found) == 32
    assert read_location(tmp_path / "a") == found != read_location(tmp_path / "b")
    assert len([*(tmp_path / "a").iterdir()]) == 1


def test_only_ownerless_stores_are_removed_and_the_oldest_first(tmp_path: Path) -> None:
    for layout in ("x", "y", "z"):
        (tmp_path / layout).mkdir()
    free = [claim(tmp_path / layout) for layout in ("x", "y", "z")]
    owned, _ = claim(tmp_path / "x")
    for age, (folder, lock) in zip((1, 3, 2), free, strict=True):
        fill(folder, age)
        os.close(lock)
    fill(owned, age=9)
    foreign = tmp_path / "backups" / "today"
    foreign.mkdir(parents=True)
    (foreign / BLOCKS).write_bytes(bytes(SIZE))
    assert 3 * SIZE <= ownerless_bytes(tmp_path) < 4 * SIZE
    removed = remove_ownerless(tmp_path, 2 * SIZE)
    assert [folder.parent.name for folder in removed] == ["y", "z"]
    assert not any(folder.exists() for folder in removed)
    assert remove_ownerless(tmp_path, 0) == []
    assert remove_ownerless(tmp_path, 1 << 60) == [free[0][0]]
    assert (owned / BLOCKS).exists()
    assert (foreign / BLOCKS).exists(), "a folder that is no store"


@pytest.mark.parametrize("gone", ["x", "y", "z"])
def test_a_store_that_goes_meanwhile_hides_no_other(tmp_path: Path, gone: str) -> None:
    """The order of folders is the file system's."""
    assert ownerless_bytes(tmp_path / "none") == 0
    for layout in ("x", "y", "z"):
        (tmp_path / layout).mkdir()
        folder, lock = claim(tmp_path / layout)
        fill(folder)
        os.close(lock)
    (tmp_path / gone / "0" / BLOCKS).unlink()
    removed = remove_ownerless(tmp_path, 1 << 60)
    assert {folder.parent.name for folder in removed} == {"x", "y", "z"} - {gone}


def test_memory_is_told_from_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mount of the folder, the last one of its mount point."""
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(folders, "MOUNTS", mounts)
    assert is_memory(tmp_path)
    for kind, expected in {"tmpfs": True, "ext4": False}.items():
        other = "ext4" if expected else "tmpfs"
        lines = [f"2 1 0:2 / {tmp_path} rw master:1 - {each} y rw" for each in (other, kind)]
        mounts.write_text("\n".join(["1 0 0:1 / / rw - overlay x rw", *lines, ""]))
        assert is_memory(tmp_path / "not" / "there") is expected
