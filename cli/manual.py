"""Writes docs/cli.md from the commands' own help (``make docs``)."""

import contextlib
import io
from importlib import import_module
from pathlib import Path

from cli.commands import COMMANDS
from cli.exit_codes import OK
from cli.main import usage

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
OPENING = """\
# The command line

<!-- Written by `make docs` from the commands' help; a test compares. -->

The help of every command, as `shoal COMMAND --help` prints it. The services (`shoal gateway`,
`tokenizer`, `scheduler` and `worker`) take their [settings](settings.md) as flags.

With `--json` a command prints one object or one list for programs (`bench` and `run-batch` write it
to the named file). Errors go to standard error. Exit codes are the same everywhere: 0: success; 1:
a negative answer, or a partial failure; 2: a wrong flag, setting or file, or a server that does not
answer; 130: Ctrl-C.
"""
# Commands with subcommands.
PARTS = {"bench": ("serve", "engine", "quality", "compare")}


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """Returns the text of docs/cli.md."""
    parts = [OPENING, _block(usage())]
    for name in COMMANDS:
        parts.append(f"## shoal {name}\n\n{_block(help_of(name))}")
        parts += [_block(help_of(name, part)) for part in PARTS.get(name, ())]
    return "\n".join(parts)


def help_of(name: str, *words: str) -> str:
    """The output of ``shoal NAME WORDS --help`` without Shoal's environment variables."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        try:
            code = import_module(COMMANDS[name].module).main([*words, "--help"])
        except SystemExit as ended:
            code = ended.code
    assert code in (OK, None), f"{name}: {code}"
    return output.getvalue()


def _block(text: str) -> str:
    return f"```\n{text.rstrip()}\n```\n"


if __name__ == "__main__":
    main()
