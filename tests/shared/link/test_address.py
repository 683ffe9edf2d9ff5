"""The mesh directory is private, or nothing starts."""

import os
from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.link.address import make_private_directory


def test_it_is_made_with_its_parents_for_us_alone(tmp_path: Path):
    make_private_directory(tmp_path / "a" / "b")
    for name in ("a", "a/b"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_one_that_others_may_enter_is_refused_with_its_mode(tmp_path: Path, mode: int):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:o}"):
        make_private_directory(tmp_path / "open")


def test_one_below_a_directory_that_others_may_write_is_refused(tmp_path: Path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can replace"):
        make_private_directory(tmp_path / "shared" / "mine")
    (tmp_path / "shared").chmod(0o1777)
    make_private_directory(tmp_path / "shared" / "mine")


def test_a_file_in_its_place_is_refused(tmp_path: Path):
    (tmp_path / "file").touch(0o600)
    with pytest.raises(ConfigError, match="must be a directory"):
        make_private_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="mesh-dir"):
        make_private_directory(tmp_path / "file" / "below")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_one_of_another_user_is_refused(tmp_path: Path):
    (tmp_path / "theirs").mkdir(mode=0o700)
    os.chown(tmp_path / "theirs", 12345, 12345)
    with pytest.raises(ConfigError, match="12345"):
        make_private_directory(tmp_path / "theirs")
