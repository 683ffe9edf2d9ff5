import re
import signal
import sys
from pathlib import Path

import pytest

from cli.commands import COMMANDS, Command
from cli.main import main
from shared.version import VERSION

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 0, "usage: shoal"),
        (["--help"], 0, "scheduler"),
        (["swim"], 2, "no such command: swim\n"),
        (["serv"], 2, "no such command: serv; did you mean serve?"),
        (["top", "--intervall", "3"], 2, "did you mean --interval? See shoal top --help"),
        (["chat", "hi", "--temp", "0"], 2, "did you mean --temperature? See shoal chat --help"),
        (["top", "--fish"], 2, "unrecognized arguments: --fish. See shoal top --help"),
        (["keys"], 2, "are required: DIR. See shoal keys --help"),
        (["plan", "--concurency", "4"], 2, "did you mean --concurrency?"),
        (["bench", "engine", "--loggprobs", "4"], 2, "did you mean --logprobs?"),
        (["bench", "quality", "--piece", "4"], 2, "did you mean --pieces?"),
        (["bench"], 0, "usage: shoal bench serve"),
        (["scheduler", "--help"], 0, "usage: shoal scheduler"),
        (["serve", "--help=tokenizer"], 0, "--served-model-name"),
        (["serve", "--port", "x"], 2, "port: 'x'"),
    ],
)
def test_a_first_command_gets_its_answer(
    monkeypatch, capsys, words: list[str], code: int, text: str
):
    monkeypatch.setattr(sys, "argv", ["shoal", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    output = capsys.readouterr()
    assert text in output.out + output.err


def test_ctrl_c_while_a_command_is_imported_ends_it_quietly(monkeypatch, tmp_path: Path, capsys):
    (tmp_path / "slow_command.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "top", Command("slow_command", "", ""))
    monkeypatch.setattr(sys, "argv", ["shoal", "top"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as caught:
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert caught.value.code == 130
    assert capsys.readouterr().err == ""


def test_the_changelog_begins_with_this_version():
    first = re.search(r"^## (\S+)", CHANGELOG.read_text(), re.MULTILINE)
    assert first is not None
    assert first[1].rstrip(",") == VERSION
