"""The files of `shoal keys`, and what a service makes of them."""

import os
from pathlib import Path

import pytest

from cli.keys import main
from shared.errors import ConfigError
from shared.keys import SERVICES, Keys, load_keys
from shared.sockets import public_key_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main([str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def keys_of_gateway(folder: Path) -> Keys:
    keys = load_keys(folder, "gateway")
    assert keys is not None
    return keys


def test_each_service_has_a_pair_and_only_its_user_reads_the_secret(folder: Path):
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 2 * len(SERVICES)
    for service in SERVICES:
        assert (folder / f"{service}.key").stat().st_mode & 0o777 == 0o644
        assert (folder / f"{service}.secret").stat().st_mode & 0o777 == 0o600
        keys = load_keys(folder, service)
        assert keys is not None
        assert keys.public == public_key_of(keys.secret)


def test_the_umask_does_not_matter(tmp_path: Path):
    before = os.umask(0o077)
    try:
        main([str(tmp_path / "keys")])
    finally:
        os.umask(before)
    assert (tmp_path / "keys" / "worker.key").stat().st_mode & 0o777 == 0o644


def test_it_says_which_machine_needs_what(tmp_path: Path, capsys):
    main([str(tmp_path / "keys")])
    said = capsys.readouterr().out
    for service in SERVICES:
        assert f"{service}.secret" in said
        assert f"{service}.key" in said
        assert (tmp_path / "keys" / f"{service}.secret").read_text().split()[-1] not in said


def test_nothing_is_ever_overwritten(folder: Path, capsys):
    for path in folder.iterdir():
        if path.name != "worker.key":
            path.unlink()
    before = (folder / "worker.key").read_text()
    assert main([str(folder)]) == 2
    assert "worker.key exists already" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["worker.key"]
    assert (folder / "worker.key").read_text() == before


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--force"]])
def test_other_arguments_write_nothing(arguments: list[str], capsys):
    assert main(arguments) == 2
    assert "usage" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_without_a_folder_there_are_no_keys():
    assert load_keys(None, "gateway") is None


def test_other_secrets_need_not_be_there(folder: Path):
    (folder / "worker.secret").unlink()
    assert keys_of_gateway(folder).public_of("worker")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_secret_that_others_may_read_is_refused_with_its_mode(folder: Path, mode: int):
    (folder / "gateway.secret").chmod(mode)
    with pytest.raises(ConfigError, match=rf"gateway\.secret.*{mode:o}"):
        load_keys(folder, "gateway")


def test_a_missing_secret_and_a_missing_public_key_are_named(folder: Path):
    (folder / "worker.key").unlink()
    with pytest.raises(ConfigError, match=r"worker\.key"):
        keys_of_gateway(folder).public_of("worker")
    (folder / "gateway.secret").unlink()
    with pytest.raises(ConfigError, match=r"gateway\.secret"):
        load_keys(folder, "gateway")


@pytest.mark.parametrize(
    "content", ["", "# only a comment\n", "x" * 39, "ä" * 40, f"{'x' * 40}\n" * 2]
)
def test_a_file_that_holds_no_key_is_refused(folder: Path, content: str):
    (folder / "worker.key").write_text(content)
    with pytest.raises(ConfigError, match=r"worker\.key must hold one key"):
        load_keys(folder, "gateway")


def test_a_key_may_begin_like_a_comment(folder: Path):
    (folder / "worker.key").write_text(f"# a comment\n#{'x' * 39}\n")
    assert keys_of_gateway(folder).public_of("worker") == b"#" + b"x" * 39


def test_two_halves_of_different_pairs_are_refused(folder: Path):
    (folder / "gateway.key").write_text((folder / "worker.key").read_text())
    with pytest.raises(ConfigError, match="no pair"):
        load_keys(folder, "gateway")


def test_a_secret_is_in_no_text_about_the_keys(folder: Path):
    keys = keys_of_gateway(folder)
    assert keys.secret.decode() not in repr(keys)
