"""The console script ``shoal``: the first word names a command, the rest are its settings."""

import os
import sys
from difflib import get_close_matches
from importlib import import_module

from cli.commands import COMMANDS, SERVICES
from cli.exit_codes import INTERRUPTED, OK, WRONG
from shared.version import VERSION

HELP = ("-h", "--help")


def main() -> None:
    command, *arguments = sys.argv[1:] or ["--help"]
    if command in COMMANDS:
        try:
            sys.exit(import_module(COMMANDS[command].module).main(arguments))
        except KeyboardInterrupt:  # also during the module's import, which may take seconds
            sys.exit(INTERRUPTED)
    if command in SERVICES:
        _run_service(command, arguments)
    if command in (*HELP, "help"):
        print(usage())
        sys.exit(OK)
    if command == "--version":
        print(f"shoal {VERSION}")
        sys.exit(OK)
    near = get_close_matches(command, [*COMMANDS, *SERVICES], 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    print(f"shoal: no such command: {command}{hint}\n\n{usage()}", file=sys.stderr)
    sys.exit(WRONG)


def _run_service(name: str, arguments: list[str]) -> None:
    """Replaces this process, unless the help is wanted."""
    if any(each.partition("=")[0] in HELP for each in arguments):
        from cli.settings_help import SERVICES, show_help

        show_help(SERVICES[name], f"shoal {name}", arguments)
    os.execv(sys.executable, [sys.executable, "-P", "-m", f"services.{name}", *arguments])


def usage() -> str:
    lines = [
        f"  {f'{name} {command.words}':24} {command.text}" for name, command in COMMANDS.items()
    ]
    return "\n".join(
        [
            "usage: shoal COMMAND [--flag value …]",
            "",
            *lines,
            f"  {' | '.join(SERVICES)}",
            f"  {'':24} one service alone, for a mesh on several machines",
            "",
            "`shoal COMMAND --help` says more. A setting can also be set as SHOAL_SETTING in",
            "the environment, or in a YAML file that --config names.",
        ]
    )
