"""The terminal output of ``shoal serve``: log lines above, the services below."""

import logging
import re
import time
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.child import Child, exit_text
from cli.exit_codes import OK
from shared.link.tcp import url_host
from shared.process.background_writer import BackgroundWriter
from shared.process.log import JsonFormatter
from shared.settings.serve import ServeConfig

STDOUT = 1
LAST_LINES_S = 1.0
BAR_WIDTH = 24
MIB = 1 << 20
STYLES = {"ready": "green", "ended": "red", "unresponsive": "red", "draining": "yellow"}
PROGRESS = re.compile(r"(.+) (\d+)%")
USUAL_LINE = re.compile(r"\S+Z INFO ")  # of a service's log


class Screen:
    """On a terminal, a live table and unusual log lines (all if ``log-level`` or ``log-requests``
    is set); elsewhere every line, and one for every change of state."""

    def __init__(self, config: ServeConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._output = BackgroundWriter(STDOUT, self._report_dropped)
        self._console = Console(
            file=cast(IO[str], self._output), highlight=False, soft_wrap=True, emoji=False
        )
        self._live = Live(console=self._console, refresh_per_second=4, auto_refresh=False)
        self._seen: dict[str, str] = {}
        self._rows: dict[str, tuple[str, str]] = {}
        self._started_s = time.monotonic()
        self._has_announced = False
        self._json = JsonFormatter("serve", config.instance)

    def __enter__(self) -> "Screen":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._output.wait_written(LAST_LINES_S)

    def print(self, line: str) -> None:
        if not is_shown(line, self._config, self._console):
            return
        if self._config.log_format == "json" and not line.startswith("{"):
            line = self._as_json(line)
        self._console.print(line, markup=False)

    def _as_json(self, text: str) -> str:
        """A line of our own, or of a library, as one of a service's log."""
        record = {"name": "shoal.serve", "levelname": "INFO", "msg": text}
        return self._json.format(logging.makeLogRecord(record))

    def _report_dropped(self, num: int) -> None:
        self.print(f"{num} lines were dropped here: they could not be written, or not fast enough")

    def show(self, children: dict[str, Child]) -> None:
        if self._console.is_terminal:
            self._draw({str(child): _row(child.status) for child in children.values()})
        else:
            self._print_changes(children)
        states = {child.status["state"] for child in children.values()}
        if states == {"ready"} and not self._has_announced:
            self._has_announced = True
            self._announce(children)

    def _draw(self, rows: dict[str, tuple[str, str]]) -> None:
        """Draws the table again if a row has changed: each service is asked several times a
        second."""
        if rows != self._rows:
            self._rows = rows
            self._live.update(_table(rows), refresh=True)

    def _print_changes(self, children: dict[str, Child]) -> None:
        for replica, child in children.items():
            text = f"{child}: {child.status['state']} {child.status['reason']}".rstrip()
            if self._seen.get(replica) != text:
                self._seen[replica] = text
                self.print(text)

    def _announce(self, children: dict[str, Child]) -> None:
        workers = [facts for child in children.values() if (facts := facts_of(child.status))]
        for name, text in workers[0] if workers else []:
            self.print(f"{name:12} {text}")
        if len(workers) > 1:
            self.print(f"{'workers':12} {len(workers)}, all like this one")
        self.print(f"{'admin':12} sockets in {self._directory}")
        seconds = time.monotonic() - self._started_s
        self.print(f"ready after {seconds:.1f} s: {self._what}   (Ctrl-C stops it)")

    @property
    def _what(self) -> str:
        """The URL, or the ranks on a host with only further ranks of a worker."""
        config, ranks = self._config, self._config.ranks_of_host
        if config.node_rank:
            last = config.num_ranks - 1
            return f"ranks {ranks.start}…{ranks[-1]} of 0…{last}, for {config.master_addr}"
        return f"{self._url}/v1"

    @property
    def _url(self) -> str:
        """A URL for a client on this machine, even if the gateway listens on every address."""
        if self._config.uds is not None:
            return f"unix:{self._config.uds}:"
        scheme = "http" if self._config.ssl_certfile is None else "https"
        return f"{scheme}://{url_host(self._config.host)}:{self._config.port}"


def is_shown(line: str, config: ServeConfig, console: Console) -> bool:
    """True if the line of a service's log is for ``console``."""
    wants_log = "log_level" in config.model_fields_set or config.log_requests
    return wants_log or not console.is_terminal or USUAL_LINE.match(line) is None


def _table(rows: dict[str, tuple[str, str]]) -> Table:
    """A line for each service: its state, or the progress of its start."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, row in rows.items():
        table.add_row(name, *_cells(*row))
    return table


def _row(status: dict[str, Any]) -> tuple[str, str]:
    return status["state"], status["reason"]


def _cells(state: str, reason: str) -> tuple[RenderableType, RenderableType]:
    if match := PROGRESS.fullmatch(reason):
        return ProgressBar(100, int(match[2]), width=BAR_WIDTH), Text(reason, "dim")
    style = "dim" if reason == exit_text(OK) else STYLES.get(state, "yellow")
    return Text(state, style), Text(reason, "dim")


def facts_of(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The main facts of a ready worker; empty for other services."""
    details = status.get("details") or {}
    if "kv_cache_tokens" not in details:
        return []
    weights, cache = details["weights_bytes"] / MIB, details["kv_cache_bytes"] / MIB
    num_tokens, length = details["kv_cache_tokens"], details["max_model_len"]
    at_once = min(details["max_num_seqs"], max(1, num_tokens // length))
    form = details["dtype"]
    if (quantization := details.get("quantization", "none")) != "none":
        form = f"{quantization} weights, {form}"
    facts = [
        ("model", f"{details['model']}, {form}"),
        ("memory", f"{weights:,.0f} MiB of weights, {cache:,.0f} MiB of KV cache"),
        ("concurrency", f"{at_once} requests of {length:,} tokens at once"),
    ]
    if "device" in details:
        name, kernels, threads = (details[key] for key in ("device", "kernels", "threads"))
        facts.insert(1, ("device", f"{name}; kernels: {kernels}; threads: {threads}"))
    return facts
