"""The share of published commands that ``shoal serve`` accepts.

Reads a folder of recipes: commands of vLLM, SGLang and FastDeploy in its texts, and settings files.
Checks settings only; no model is read.
"""

import argparse
import contextlib
import io
import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cli.serve import with_model
from shared.errors import ConfigError
from shared.settings.load import load_settings
from shared.settings.serve import ServeConfig

COMMAND = re.compile(
    r"(?:vllm serve|(?:python3? -m )?(?:vllm|fastdeploy)\.entrypoints\.openai\.api_server"
    r"|(?:python3? -m )?sglang\.launch_server|sglang serve) (?P<arguments>[^\n|&;`#<]+)"
)
OTHER_SERVERS = ("--omni", "--headless-router")
TEXTS = {".md", ".yaml", ".yml", ".sh", ".txt", ".json"}


class Outcome(NamedTuple):
    command: str
    problem: str
    ignored: tuple[str, ...]


def commands_of(folder: Path) -> Iterator[list[str]]:
    """Yields the arguments of each command in the texts of ``folder``."""
    for path in sorted(each for each in folder.rglob("*") if each.suffix in TEXTS):
        text = re.sub(r"\\\s*\n", " ", path.read_text(errors="replace"))
        for match in COMMAND.finditer(text):
            with contextlib.suppress(ValueError):  # unbalanced quotation mark
                yield shlex.split(match["arguments"])


def files_of(folder: Path) -> Iterator[Path]:
    """Yields the files of ``folder`` with a setting on each line."""
    for path in sorted(folder.rglob("*.yaml")):
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        if lines and all(re.match(r"(#|[a-z_-]+: *\S)", line) for line in lines):
            yield path


def try_command(arguments: list[str]) -> Outcome:
    handler = _Lines()
    logging.getLogger("shared").addHandler(handler)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            load_settings(ServeConfig, with_model(arguments), "shoal serve")
        problem = ""
    except ConfigError as error:
        problem = str(error).splitlines()[0]
    finally:
        logging.getLogger("shared").removeHandler(handler)
    return Outcome(shlex.join(arguments), problem, tuple(handler.lines))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(folder: Path, *, is_long: bool) -> None:
    found = [arguments for arguments in commands_of(folder) if not {*OTHER_SERVERS} & {*arguments}]
    found += [["--config", str(path)] for path in files_of(folder)]
    outcomes = [try_command(arguments) for arguments in found]
    failed = [each for each in outcomes if each.problem]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} start")
    for problem, num in Counter(each.problem for each in failed).most_common():
        print(f"{num:5}  {problem}")
    if is_long:
        for line, num in Counter(line for each in outcomes for line in each.ignored).most_common():
            print(f"{num:5}  {line}")


if __name__ == "__main__":
    logging.getLogger("shared").propagate = False
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--long", action="store_true", help="also count settings without effect")
    given = parser.parse_args()
    main(given.folder, is_long=given.long)
