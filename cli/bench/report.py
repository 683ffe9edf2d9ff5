"""Prints the results of a run."""

from typing import Any

from rich.console import Console
from rich.table import Table

from cli.bench.figures import PERCENTILES
from cli.bench.result import Result
from cli.bench.stream import printable

MAX_BUSY = 0.8  # above it, the client's own wait for a core distorts the measurement
NUM_ERRORS_SHOWN = 5
TIMES = {"TTFT": "ttft_ms", "TPOT": "tpot_ms", "ITL": "itl_ms", "e2e": "e2e_ms"}


def show(result: Result, console: Console) -> None:
    console.print(_summary(result))
    console.print(_times(result))
    for line in [*_errors(result.figures), *_warnings(result)]:
        console.print(line, soft_wrap=True)
    if result.verdict is not None:
        console.print(result.verdict["sentence"], soft_wrap=True)


def _summary(result: Result) -> Table:
    found = result.figures
    table = Table.grid(padding=(0, 3))
    num_whole = found["num_requests"] - found["num_failed"]
    facts = {
        "server": f"{result.settings.url}, {printable(result.model)}, {result.settings.endpoint}",
        "requests": f"{num_whole} whole, {found['num_failed']} failed, "
        f"in {found['duration_s']:.2f} s",
        "requests/s": f"{found['requests_per_s']:.2f}",
        "tokens/s": f"{found['input_tokens_per_s']:.0f} in, {found['output_tokens_per_s']:.0f} out",
    }
    if "goodput" in found:
        goodput = found["goodput"]
        facts["goodput"] = f"{goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%}"
    facts["client"] = f"{result.client_busy:.0%} of a core"
    for name, text in facts.items():
        table.add_row(name, text)
    return table


def _times(result: Result) -> Table:
    table = Table()
    table.add_column("ms")
    for name in ("mean", *(f"P{each}" for each in PERCENTILES)):
        table.add_column(name, justify="right")
    late = {"sent late": "late_ms"} if result.settings.is_open_loop else {}
    for name, figure in (TIMES | late).items():
        spread = result.figures[figure]
        cells = [f"{value:.2f}" for value in spread.values()] if spread else ["–"] * 4
        table.add_row(name, *cells)
    return table


def _errors(found: dict[str, Any]) -> list[str]:
    return [f"{num} × {text}" for text, num in [*found["errors"].items()][:NUM_ERRORS_SHOWN]]


def _warnings(result: Result) -> list[str]:
    lines = []
    if result.client_busy > MAX_BUSY:
        lines.append(
            f"warning: this client was busy for {result.client_busy:.0%} of the time;"
            f" above {MAX_BUSY:.0%} it measures itself too"
        )
    if result.settings.ignore_eos and (num_short := result.figures["num_short"]):
        lines.append(f"warning: answers shorter than requested: {num_short}")
    return lines
