"""What ``shoal serve`` shows: log lines above, the table of services below."""

import time
from pathlib import Path
from typing import IO, cast

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cli.child import Child
from shared.background_writer import BackgroundWriter
from shared.config.serve import ServeConfig

STDOUT = 1
LAST_LINES_S = 1.0
STYLES = {"ready": "green", "ended": "red", "unresponsive": "red", "draining": "yellow"}


class Screen:
    """On a terminal a table that lives; elsewhere one line for every change of state."""

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._output = BackgroundWriter(STDOUT, self._report_dropped)
        self._console = Console(
            file=cast(IO[str], self._output), highlight=False, soft_wrap=True, emoji=False
        )
        self._live = Live(console=self._console, refresh_per_second=4, auto_refresh=False)
        self._seen: dict[str, str] = {}
        self._started_s = time.monotonic()
        self._has_announced = False

    def __enter__(self) -> "Screen":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._output.wait_written(LAST_LINES_S)

    def print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def _report_dropped(self, num: int) -> None:
        self.print(f"{num} lines were dropped here: they could not be written, or not fast enough")

    def show(self, children: dict[str, Child]) -> None:
        if self._console.is_terminal:
            self._live.update(self._table(children), refresh=True)
        else:
            self._print_changes(children)
        states = {child.status["state"] for child in children.values()}
        if states == {"ready"} and not self._has_announced:
            self._has_announced = True
            self._announce(children)

    def _print_changes(self, children: dict[str, Child]) -> None:
        for replica, child in children.items():
            text = f"{child}: {child.status['state']} {child.status['reason']}".rstrip()
            if self._seen.get(replica) != text:
                self._seen[replica] = text
                self.print(text)

    def _table(self, children: dict[str, Child]) -> Table:
        table = Table()
        for column in ("service", "instance", "pid", "address", "state"):
            table.add_column(column)
        for child in children.values():
            state = child.status["state"]
            text = f"{state}: {child.status['reason']}" if child.status["reason"] else state
            pid = str(child.status.get("pid", ""))
            row = (child.service, child.instance, pid, self._address(child), text)
            table.add_row(*row, style=STYLES.get(state))
        return table

    def _address(self, child: Child) -> str:
        """Where others reach it; a worker dials and listens nowhere."""
        match child.service:
            case "gateway":
                return self._url
            case "tokenizer":
                return f"ipc tokenizer-{child.instance}"
            case "scheduler":
                return f"ipc scheduler.{{tokenizers,workers}}-{child.instance}"
            case _:
                return "dials the scheduler"

    def _announce(self, children: dict[str, Child]) -> None:
        if not self._console.is_terminal:
            self._console.print(self._table(children))
        seconds = time.monotonic() - self._started_s
        self.print(f"admin sockets in {self._directory}")
        self.print(f"ready after {seconds:.1f} s: {self._url}/v1   (Ctrl-C stops it)")

    @property
    def _url(self) -> str:
        """A URL for a client on this machine, also where we listen on every address."""
        if self._config.uds is not None:
            return f"unix:{self._config.uds}:"
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)
        scheme = "http" if self._config.ssl_certfile is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._config.port}"
