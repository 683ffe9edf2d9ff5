"""The files of `shoal keys`, and their use by a service."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from cli.keys import main, write_keys
from shared.errors import ConfigError
from shared.link.keys import SERVICES, Keys, load_keys, public_path, secret_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main([str(tmp_path / "keys")]) == 0
    return tmp_path / "keys"


def keys_of_gateway(folder: Path) -> Keys:
    keys = load_keys(folder, "gateway")
    assert keys is not None
    return keys


def test_each_service_has_a_pair_and_only_its_user_reads_the_secret(folder: Path):
    assert {path.name for path in folder.iterdir()} == {"public", *SERVICES}
    for service in SERVICES:
        assert (folder / service).stat().st_mode & 0o777 == 0o700
        assert public_path(folder, service).stat().st_mode & 0o777 == 0o644
        assert secret_path(folder, service).stat().st_mode & 0o777 == 0o400
        keys = load_keys(folder, service)
        assert keys is not None
        assert keys.public == zmq.curve_public(keys.secret)


def test_the_umask_does_not_matter(tmp_path: Path):
    before = os.umask(0o077)
    try:
        main([str(tmp_path / "keys")])
    finally:
        os.umask(before)
    assert public_path(tmp_path / "keys", "worker").stat().st_mode & 0o777 == 0o644


def test_making_keys_prints_which_machine_needs_which_files(tmp_path: Path, capsys):
    folder = tmp_path / "keys"
    main([str(folder)])
    printed = capsys.readouterr().out
    assert "made keys for gateway, tokenizer, scheduler, worker" in printed
    assert str(folder / "public") in printed
    for service in SERVICES:
        assert str(folder / service) in printed
        assert secret_path(folder, service).read_text().split()[-1] not in printed


def test_a_second_time_changes_nothing(folder: Path, capsys):
    before = contents(folder)
    assert main([str(folder)]) == 0
    assert "all keys exist already" in capsys.readouterr().out
    assert contents(folder) == before


def test_a_pair_that_was_taken_away_is_made_anew_and_the_others_stay(folder: Path, capsys):
    before = contents(folder)
    public, secret = public_path(folder, "worker"), secret_path(folder, "worker")
    public.unlink()
    secret.unlink()
    assert main([str(folder)]) == 0
    assert "made keys for worker\n" in capsys.readouterr().out
    after = contents(folder)
    changed = {path for path in after if after[path] != before[path]}
    assert changed == {public, secret}
    assert load_keys(folder, "worker")


def test_a_secret_whose_public_key_was_never_written_gets_it(folder: Path):
    before = contents(folder)
    public_path(folder, "worker").unlink()
    (folder / "worker" / "worker.part").write_text("we were stopped here")
    assert main([str(folder)]) == 0
    assert contents(folder) == before | {folder / "worker" / "worker.part": "we were stopped here"}


def test_a_copy_for_one_machine_is_not_completed(folder: Path, capsys):
    secret_path(folder, "worker").unlink()
    before = contents(folder)
    assert main([str(folder)]) == 2
    assert "worker.secret" in capsys.readouterr().err
    assert contents(folder) == before


def contents(folder: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("arguments", [[], ["a", "b"], ["--force"]])
def test_other_arguments_write_nothing(arguments: list[str], capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("shoal keys: ")


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "file")]) == 2
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_without_a_folder_there_are_no_keys():
    assert load_keys(None, "gateway") is None


def test_other_secrets_need_not_be_there(folder: Path):
    secret_path(folder, "worker").unlink()
    assert keys_of_gateway(folder).public_of("worker")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_secret_that_others_may_read_is_refused_with_its_mode(folder: Path, mode: int):
    secret_path(folder, "gateway").chmod(mode)
    with pytest.raises(ConfigError, match=rf"gateway\.secret.*{mode:o}"):
        load_keys(folder, "gateway")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_secret_of_roots_may_be_read_by_our_group_alone():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_keys(folder)
        (folder / "gateway").chmod(0o755)
        secret = secret_path(folder, "gateway")
        os.chown(secret, 0, 10001)
        secret.chmod(0o440)
        with user(10001):
            assert load_keys(folder, "gateway")
        secret.chmod(0o444)
        with user(10001), pytest.raises(ConfigError, match="444; the limit is 640"):
            load_keys(folder, "gateway")


@contextmanager
def user(number: int) -> Iterator[None]:
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def test_a_missing_secret_and_a_missing_public_key_are_named(folder: Path):
    public_path(folder, "worker").unlink()
    with pytest.raises(ConfigError, match=r"worker\.key"):
        keys_of_gateway(folder).public_of("worker")
    secret_path(folder, "gateway").unlink()
    with pytest.raises(ConfigError, match=r"gateway\.secret"):
        load_keys(folder, "gateway")


@pytest.mark.parametrize(
    "content", ["", "# only a comment\n", "x" * 39, "ä" * 40, f"{'x' * 40}\n" * 2]
)
def test_a_file_that_holds_no_key_is_refused(folder: Path, content: str):
    public_path(folder, "worker").write_text(content)
    with pytest.raises(ConfigError, match=r"worker\.key must hold one key"):
        load_keys(folder, "gateway")


def test_a_key_may_begin_like_a_comment(folder: Path):
    public_path(folder, "worker").write_text(f"# a comment\n#{'x' * 39}\n")
    assert keys_of_gateway(folder).public_of("worker") == b"#" + b"x" * 39


def test_two_halves_of_different_pairs_are_refused(folder: Path):
    public_path(folder, "gateway").write_text(public_path(folder, "worker").read_text())
    with pytest.raises(ConfigError, match="no pair"):
        load_keys(folder, "gateway")


def test_a_secret_is_in_no_text_about_the_keys(folder: Path):
    keys = keys_of_gateway(folder)
    assert keys.secret.decode() not in repr(keys)
