"""``shoal bench compare``: two result files in one table."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from cli.console import console_for_people
from cli.flags import Parser
from shared.errors import ConfigError

NOT_COMPARED = {"errors", "goodput.targets_ms"}  # counts by text, and targets
MACHINE = ("processor", "cores")
PLACES = {"json", "rows", "url"}  # settings without influence on the figures


def compare(arguments: list[str]) -> int:
    """Returns the exit code. Raises ConfigError."""
    options = _parse(arguments)
    first, second = _read(options.first), _read(options.second)
    if first["benchmark"] != second["benchmark"]:
        kinds = f"{first['benchmark']} and {second['benchmark']}"
        raise ConfigError(f"the files are results of different benchmarks: {kinds}")
    with console_for_people() as console:
        _show(options, first, second, console)
    return 0


def rows(first: dict[str, Any], second: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """The figures that both have, by name."""
    theirs = dict(_numbers(second))
    for name, value in _numbers(first):
        if name in theirs:
            yield name, value, theirs[name]


def differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[str]:
    """Models, machines and settings that are not the same."""
    ours, theirs = _circumstances(first), _circumstances(second)
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            yield f"different {name}: {ours.get(name)}, {theirs.get(name)}"


def _circumstances(result: dict[str, Any]) -> dict[str, Any]:
    machine, settings = result["machine"], result["settings"]
    found = {"model": result["model"], **{name: machine.get(name) for name in MACHINE}}
    return found | {name: settings[name] for name in sorted(settings.keys() - PLACES)}


def _numbers(figures: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        path = f"{prefix}{name}"
        if path in NOT_COMPARED:
            continue
        if isinstance(value, dict):
            yield from _numbers(value, f"{path}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield path, value


def _read(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = None
    needed = {"benchmark", "figures", "machine", "model", "settings"}
    if not isinstance(found, dict) or not needed <= found.keys():
        raise ConfigError(f"{path} is no result of shoal bench; --json writes one")
    return found


def _parse(arguments: list[str]) -> Namespace:
    parser = Parser(
        "shoal bench compare",
        description="Compares two result files of one benchmark: each figure, and its ratio.",
        epilog="Exit codes: 0; 2: a wrong file.",
    )
    parser.add_argument("first", type=Path, metavar="A", help="file that --json wrote")
    parser.add_argument("second", type=Path, metavar="B", help="the other file")
    return parser.parse_args(arguments)


def _show(
    options: Namespace, first: dict[str, Any], second: dict[str, Any], console: Console
) -> None:
    table = Table()
    table.add_column(f"shoal bench {first['benchmark']}")
    for name in (options.first.name, options.second.name, "B/A"):
        table.add_column(name, justify="right")
    for name, one, other in rows(first["figures"], second["figures"]):
        table.add_row(name, _text(one), _text(other), f"{other / one:.3f}" if one else "–")
    console.print(table)
    for line in differences(first, second):
        console.print(line, soft_wrap=True)


def _text(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
