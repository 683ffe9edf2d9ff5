"""``shoal doctor``: what this machine can run, and changes that help."""

import json

from rich.table import Table
from rich.text import Text

from cli.command import run
from cli.console import console_for_people
from cli.doctor.facts import gather
from cli.doctor.findings import Finding, findings
from cli.exit_codes import FAILED, OK
from cli.flags import Parser
from shared.settings.load import load_settings
from shared.settings.serve import ServeConfig

STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


def main(arguments: list[str]) -> int:
    return run("doctor", lambda: _doctor(arguments))


def _doctor(arguments: list[str]) -> int:
    parser = Parser(
        "shoal doctor",
        usage="shoal doctor [--json] [--setting VALUE …]",
        description="Checks this machine for a mesh, and names changes that help. Takes all"
        " settings of `shoal serve`, for example --model.",
        epilog="Exit codes: 0: a mesh starts; 1: it does not; 2: a wrong flag or setting.",
    )
    parser.add_argument("--json", action="store_true", help="prints a list")
    options, settings = parser.parse_known_args(arguments)
    found = findings(gather(load_settings(ServeConfig, settings, "shoal doctor", vars(options))))
    if options.json:
        print(json.dumps([each._asdict() for each in found], indent=2))
    else:
        _show(found)
    return FAILED if any(each.state == "problem" for each in found) else OK


def _show(found: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    for each in found:
        text = Text(each.text)
        if each.fix and each.state != "ok":
            text.append(f"\n→ {each.fix}", "bold")
        table.add_row(Text(each.state, STYLES[each.state]), each.topic, text)
    with console_for_people() as console:
        console.print(table)
