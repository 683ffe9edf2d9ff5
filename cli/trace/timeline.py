"""A trace as a timeline in the terminal."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from cli.console import printable

STYLES = {"gateway": "cyan", "tokenizer": "green", "scheduler": "yellow", "worker": "magenta"}
MIN_BAR, MAX_BAR = 10, 60
BAR, POINT = "━", "╸"
INDENT = "  "

Span = dict[str, Any]
Row = tuple[str, str, str, str]
HEAD: Row = ("service", "span", "from ms", "ms")


def show_trace(trace: dict[str, Any], console: Console) -> None:
    facts = trace["spans"][0]["attributes"]
    console.print(
        Text.assemble(
            (f"{trace['id']}", "bold"),
            f"  {trace['route']}  {facts.get('status', '')} {facts.get('code', '')}".rstrip(),
            f"  {trace['duration_ms']:.1f} ms",
        ),
        soft_wrap=True,
    )
    console.print(Text(f"trace {trace['trace_id']}", "dim"))
    spans = list(_in_order(trace["spans"]))
    rows = [HEAD, *(_row(span, depth, trace) for span, depth in spans)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    num_cells = max(MIN_BAR, min(MAX_BAR, console.width - sum(widths) - len(widths)))
    console.print(Text(_line(HEAD, widths), "bold"), soft_wrap=True)
    for row, (span, depth) in zip(rows[1:], spans, strict=True):
        style = STYLES.get(span["service"]["role"], "")
        bar = (_bar(span, trace, num_cells), style)
        console.print(Text.assemble(_line(row, widths), " ", bar), soft_wrap=True)
        if words := _words(span["attributes"]):
            indent = widths[0] + 1 + len(INDENT) * (depth + 1)
            text = Text(words, "dim", overflow="fold")
            console.print(Padding(text, (0, 0, 0, indent), expand=False))


def show_list(traces: list[dict[str, Any]], console: Console) -> None:
    """Fits 80 columns if ids are Shoal's own."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    longest = max((cell_len(each["id"]) for each in traces), default=0)
    table.add_column("request", no_wrap=True, min_width=longest)
    table.add_column("route", overflow="fold")
    for name in ("status", "ms", "TTFT ms", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in traces:
        facts = each["attributes"]
        ttft_ms = facts.get("ttft_ms")
        table.add_row(
            *(
                each["id"],
                each["route"].removeprefix("/v1"),
                str(facts.get("status", "")),
                _ms(each["duration_ms"]),
            ),
            "–" if ttft_ms is None else _ms(ttft_ms),
            str(facts.get("num_output_tokens", "–")),
        )
    console.print(table)


def _ms(time_ms: float) -> str:
    return f"{time_ms:.1f}" if time_ms < 1000 else f"{time_ms:.0f}"


def _in_order(spans: list[Span]) -> Iterator[tuple[Span, int]]:
    """Each span with its depth, before its parts, which are sorted by time."""
    whole, *others = spans
    ids = {span["id"] for span in spans}
    parts: dict[str, list[Span]] = defaultdict(list)
    for span in others:
        parts[span["parent"] if span["parent"] in ids else whole["id"]].append(span)
    stack = [(whole, 0)]
    while stack:
        span, depth = stack.pop()
        yield span, depth
        inner = sorted(parts.pop(span["id"], []), key=lambda each: (each["start"], each["id"]))
        stack += [(each, depth + 1) for each in reversed(inner)]


def _row(span: Span, depth: int, trace: dict[str, Any]) -> Row:
    return (
        printable(f"{span['service']['role']} {span['service']['instance']}"),
        INDENT * depth + printable(span["name"]),
        f"{max(0.0, _from_ms(span, trace)):.1f}",
        f"{span['duration_ms']:.1f}",
    )


def _line(row: Row, widths: list[int]) -> str:
    texts = [set_cell_size(text, width) for text, width in zip(row[:2], widths, strict=False)]
    numbers = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
    return " ".join(texts + numbers)


def _from_ms(span: Span, trace: dict[str, Any]) -> float:
    return float(1000 * (span["start"] - trace["start"]))


def _bar(span: Span, trace: dict[str, Any], num_cells: int) -> str:
    """Parts outside the request (by clock differences) are drawn at its border."""
    scale = num_cells / max(trace["duration_ms"], 1e-6)
    start = min(num_cells - 1, max(0, int(_from_ms(span, trace) * scale)))
    num = min(num_cells - start, round(span["duration_ms"] * scale))
    return " " * start + (BAR * num if num else POINT)


def _words(attributes: dict[str, Any]) -> str:
    return printable(" ".join(f"{name}={value}" for name, value in attributes.items()))
