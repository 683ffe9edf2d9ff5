"""``shoal top``: the services of a mesh and their load, live at a terminal."""

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cli.command import run
from cli.console import console_for_people
from cli.exit_codes import FAILED, OK
from cli.flags import Parser, add_server, number
from cli.server import NoServerError, RefusedError, Server
from cli.top.table import mesh_table

PATH = "/v1/mesh"
TIMEOUT_S = 10.0
MAX_BYTES = 1024
GOOD = {"ready", "draining"}


def main(arguments: list[str]) -> int:
    return run("top", lambda: _top(arguments))


def _top(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    server = Server(options.url, options.api_key, TIMEOUT_S)
    if options.json:
        mesh = server.get(PATH)
        print(json.dumps(mesh, ensure_ascii=False))
        return _code(mesh)
    if options.once or not Console().is_terminal:
        return _once(server, options.interval)
    return _live(server, options.interval)


def _parser() -> Parser:
    parser = Parser(
        "shoal top",
        description="Shows the services of a mesh and their load, from a gateway's /v1/mesh; q"
        " quits.",
        epilog="Exit codes: 0; with --once or --json, or in a pipe, 1 where a service is not"
        " ready; 2: a wrong flag, or no server at --url.",
    )
    add_server(parser.add_argument)
    text = "seconds between refreshes (default: %(default)g)"
    add = parser.add_argument
    add("--interval", type=number(0.1, 3600), default=1.0, metavar="S", help=text)
    add("--once", action="store_true", help="prints the table once")
    add("--json", action="store_true", help="prints the gateway's reply once")
    return parser


def _code(mesh: Any) -> int:
    return OK if all(each["state"] in GOOD for each in mesh["services"]) else FAILED


def _once(server: Server, interval_s: float) -> int:
    """Requests the state twice, since a service's CPU use is a difference."""
    cpu = CpuTimes()
    cpu.cores(server.get(PATH))
    time.sleep(interval_s)
    mesh = server.get(PATH)
    with console_for_people() as console:
        console.print(mesh_table(mesh["services"], cpu.cores(mesh)))
    return _code(mesh)


def _live(server: Server, interval_s: float) -> int:
    """Refreshes until q is pressed, also while the server is temporarily gone."""
    mesh = server.get(PATH)
    cpu = CpuTimes()
    with _single_keys(), Live(auto_refresh=False, screen=True) as live:
        while True:
            footer = ""
            try:
                mesh = server.get(PATH)
            except (NoServerError, RefusedError) as error:
                footer = str(error)
            live.update(_screen(server.url, mesh, cpu.cores(mesh), footer), refresh=True)
            if "q" in _wait_for_keys(interval_s).lower():
                return OK


@contextmanager
def _single_keys() -> Iterator[None]:
    """Within it keys arrive one by one, without an end of line, and are not echoed; restores the
    terminal at the end. Does nothing if standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_for_keys(seconds: float) -> str:
    """Returns what is typed first within ``seconds``, or ""."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return ""
    has_keys, _, _ = select.select([sys.stdin], [], [], seconds)
    return os.read(sys.stdin.fileno(), MAX_BYTES).decode(errors="replace") if has_keys else ""


def _screen(url: str, mesh: Any, cpu: dict[tuple[str, str], float], problem: str) -> Group:
    services = mesh["services"]
    tokens_per_s = sum(each["stats"].get("tokens_per_s", 0) for each in services)
    clock = time.strftime("%H:%M:%S", time.localtime(mesh["time"]))
    head = Text(f"{url}  {clock}  {tokens_per_s:.0f} tokens/s in all", "bold")
    foot = Text(problem, "red") if problem else Text("q ends", "dim")
    return Group(head, Text(), mesh_table(services, cpu), Text(), foot)


class CpuTimes:
    """CPU use of services between two refreshes."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str], tuple[float, float]] = {}  # time, seconds used
        self._cores: dict[tuple[str, str], float] = {}

    def cores(self, mesh: Any) -> dict[tuple[str, str], float]:
        """The cores each service has used since the previous refresh."""
        times = {
            (each["role"], each["instance"]): (mesh["time"], each["stats"]["cpu_s"])
            for each in mesh["services"]
            if "cpu_s" in each["stats"]
        }
        for name, (now_s, used_s) in times.items():
            before_s, before_used_s = self._before.get(name, (now_s, used_s))
            if now_s > before_s:
                self._cores[name] = (used_s - before_used_s) / (now_s - before_s)
        self._before = times
        return {name: cores for name, cores in self._cores.items() if name in times}
