"""The flags of ``shoal run-batch``, and errors before anything starts."""

import json
from pathlib import Path

import pytest

from cli.batch.command import main
from cli.batch.options import parse
from shared.errors import ConfigError
from tests.shared.batch.test_lines import line, write


def test_unknown_options_are_settings_of_the_mesh(tmp_path: Path):
    path = write(tmp_path / "in", line())
    options, settings = parse(
        ["-i", str(path), "--model", "/m", "-o", str(tmp_path / "out"), "--max-num-seqs=4"]
    )
    assert options.input_file == path
    assert settings == ["--model", "/m", "--max-num-seqs=4"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-i", "https://x/in", "-o", "out"], "only local paths"),
        (["-i", "in", "-o", "https://x/out"], "only local paths"),
        (["-i", "none", "-o", "out"], "no such file"),
        (["-i", "in", "-o", "in"], "is the input file"),
        (["-i", "in", "-o", "no/where"], "is not a path for a file"),
        (
            ["-i", "in", "-o", "out", "--url", "http://a", "--model", "m"],
            "settings are for a mesh of its own",
        ),
        (["-i", "in", "-o", "out", "--url", "http://a", "--prio", "3"], "did you mean --priority"),
        (["-i", "in", "-o", "out", "--priority", "1001"], "--priority: '1001'.*1000"),
        (["-i", "in", "-o", "out", "--api-key", "k"], "--api-key: needs --url"),
        (["-i", "in"], "-o"),
    ],
)
def test_wrong_flags_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], words: str
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", line())
    with pytest.raises(ConfigError, match=words):
        parse(flags)


def test_the_key_comes_from_the_environment_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_API_KEY", "secret")
    path = write(tmp_path / "in", line())
    options, _ = parse(["-i", str(path), "-o", str(tmp_path / "out"), "--url", "http://a"])
    assert options.api_key == "secret"


def test_ids_that_come_twice_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, out = write(tmp_path / "in", line("a"), line("b"), line("a")), tmp_path / "out"
    assert main(["-i", str(path), "-o", str(out)]) == 2
    assert "custom_id 'a' is in line 1 and in line 3" in capsys.readouterr().err
    assert not out.exists()


def test_the_results_of_another_input_are_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, out = write(tmp_path / "in", line("a")), tmp_path / "out"
    out.write_text("mine\n")
    assert main(["-i", str(path), "-o", str(out)]) == 2
    assert f"{out}, line 1, is no result of this input" in capsys.readouterr().err
    assert out.read_text() == "mine\n"


def test_a_server_that_is_not_there_leaves_all_to_the_next_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path, out = write(tmp_path / "in", line("a")), tmp_path / "out"
    flags = ["--url", "http://127.0.0.1:9", "--retry", "0", "--json", str(tmp_path / "summary")]
    assert main(["-i", str(path), "-o", str(out), *flags]) == 3
    assert "the same command resumes" in capsys.readouterr().err
    assert out.read_text() == ""
    summary = json.loads((tmp_path / "summary").read_text())
    assert (summary["total"], summary["completed"], summary["exit_code"]) == (1, 0, 3)
    assert summary["stopped"] == "the server does not answer: Connection refused"
