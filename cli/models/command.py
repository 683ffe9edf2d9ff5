"""``shoal models``: the models on this machine and their support."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cli.command import run
from cli.console import console_for_people
from cli.exit_codes import FAILED, OK
from cli.flags import Parser
from cli.models.found import cached_models, weights_bytes
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, EMBEDDED_MODEL, find_file, weight_files
from shared.model_location import FORMATS, ModelLocation, in_other_format

COUNTS = {"B": 10**9, "M": 10**6, "K": 10**3, "": 1}
SIZES = {" GiB": 1 << 30, " MiB": 1 << 20, " KiB": 1 << 10, " B": 1}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``backend`` computes the model; if empty, no backend can, and ``reason`` explains it.
    ``parameters`` is 0 if unknown."""

    backend: Literal["", "shoal", "transformers"]
    reason: str = ""
    architecture: str = ""
    parameters: int = 0
    max_model_len: int = 0
    runner: str = ""


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    folder: Path
    size_bytes: int
    verdict: Verdict


def main(arguments: list[str]) -> int:
    return run("models", lambda: _models(arguments))


def _models(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    listed = []
    with Console(stderr=True).status("looking …"):  # prints nothing without a terminal
        for model in find_models(options.folder):
            folder = model.folder
            listed.append(Listed(model.name, folder, weights_bytes(folder), check(folder)))
    if options.json:
        print(json.dumps([_as_object(each) for each in listed], ensure_ascii=False))
    elif listed:
        with console_for_people() as console:
            console.print(_table(listed))
    else:
        print(f"no model in {', '.join(map(str, options.folder))}")
    return OK if any(each.verdict.backend for each in listed) else FAILED


def _parser() -> Parser:
    parser = Parser(
        "shoal models",
        description="Lists the embedded model and the models of the Hugging Face cache, or of"
        " FOLDERs, with their type and support, judged by their config.",
        epilog="Exit codes: 0; 1: none that can be served; 2: a wrong flag or folder.",
    )
    text = "a model's folder, or a folder of models"
    parser.add_argument("folder", nargs="*", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--json", action="store_true", help="prints a list of objects")
    return parser


def find_models(folders: Sequence[Path]) -> list[ModelLocation]:
    """Models in ``folders``, each of which is a model or contains some; without folders the
    embedded model and the Hugging Face cache. Raises ConfigError."""
    if not folders:
        return [ModelLocation(EMBEDDED_MODEL.name, EMBEDDED_MODEL), *cached_models()]
    return [each for folder in folders for each in _models_in(folder)]


def _models_in(folder: Path) -> Iterator[ModelLocation]:
    if not folder.is_dir():
        raise ConfigError(f"FOLDER: no such folder: {folder}")
    inner = [each for each in sorted(folder.iterdir()) if _is_model(each)]
    for each in [folder] if _is_model(folder) else inner:
        yield ModelLocation(each.resolve().name, each)


def _is_model(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or any(any(folder.glob(f"*{end}")) for end in FORMATS)


def _as_object(model: Listed) -> dict[str, object]:
    flat = {"name": model.name, "folder": str(model.folder), "size_bytes": model.size_bytes}
    return flat | {"can_serve": bool(model.verdict.backend)} | asdict(model.verdict)


def _table(listed: list[Listed]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("MODEL", overflow="fold")
    for name in ("PARAMETERS", "SIZE"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("SERVED BY")
    for each in listed:
        verdict = each.verdict
        served_by = Text(f"no: {verdict.reason}", "red")
        if verdict.backend:
            served_by = Text.assemble((verdict.backend, "green"), f" {verdict.architecture}")
        num = rounded(verdict.parameters, COUNTS) if verdict.parameters else ""
        table.add_row(each.name, num, rounded(each.size_bytes, SIZES), served_by)
    return table


def rounded(num: int, units: dict[str, int]) -> str:
    """A number in the largest unit not above it."""
    name, size = next(each for each in units.items() if num >= each[1] or each[1] == 1)
    return f"{num / size:.1f}{name}" if size > 1 else f"{num}{name}"


def check(folder: Path) -> Verdict:
    """Uses the worker's own code, which imports torch, unless a file is missing."""
    try:
        if found := in_other_format(folder):
            folder = found.folder
        find_file(folder, CONFIG_FILE)
        weight_files(folder)
        from cli.models.check_config import check_config

        config = check_config(folder)
    except ConfigError as error:
        where = re.escape(str(folder))
        return Verdict("", re.sub(f"^model: |{where}[/ ]", "", str(error)))
    model = config.model
    return Verdict(
        *(config.backend, "", config.architecture, config.parameters),
        *(model.max_model_len, model.runner),
    )
