"""A trace in a terminal."""

import io
from typing import Any

from rich.console import Console

from cli.console import console_for_people
from cli.trace.timeline import show_list, show_trace


def span(number: int, parent: str | None, role: str, name: str, **place: Any) -> dict[str, Any]:
    service = {"role": role, "instance": "0.1"}
    return {"id": str(number), "parent": parent, "service": service, "name": name} | place


TRACE: dict[str, Any] = {
    "id": "mine",
    "trace_id": "4bf9",
    "route": "/v1/completions",
    "start": 100.0,
    "duration_ms": 1000.0,
    "spans": [
        span(
            1, None, "gateway", "POST", start=100.0, duration_ms=1000.0, attributes={"status": 200}
        ),
        span(4, "3", "worker", "decode", start=100.5, duration_ms=500.0, attributes={}),
        span(2, "1", "tokenizer", "prompt", start=100.0, duration_ms=0.01, attributes={}),
        span(3, "gone", "scheduler", "run", start=100.25, duration_ms=750.0, attributes={"a": "b"}),
    ],
}


def shown(show: Any, what: Any, width: int = 132) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    show(what, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_bars_stand_where_the_spans_lie_and_parts_below_their_wholes() -> None:
    head, trace_id, _, *lines = shown(show_trace, TRACE)
    rows = [line for line in lines if "=" not in line]
    assert head.split() == ["mine", "/v1/completions", "200", "1000.0", "ms"]
    assert trace_id == "trace 4bf9"
    assert [row.split()[2] for row in rows] == ["POST", "prompt", "run", "decode"]
    indents = [len(row) - len(row[13:].lstrip()) for row in rows]
    assert indents == sorted(indents)
    bars = [(row.find("━"), row.count("━")) for row in rows]
    (start, whole), _, (run, run_len), (decode, decode_len) = bars
    assert (run - start, run_len) == (whole // 4, whole - whole // 4)
    assert (decode - start, decode_len) == (whole // 2, whole // 2)
    assert rows[1].count("╸") == 1
    facts = {lines.index(line): line.strip() for line in lines if "=" in line}
    assert facts == {1: "status=200", 4: "a=b"}


def test_no_value_is_cut_in_a_narrow_terminal() -> None:
    long = {f"num_{number}": 10**9 + number for number in range(12)}
    spans = [TRACE["spans"][0] | {"attributes": {"status": 200, **long}}]
    lines = shown(show_trace, TRACE | {"spans": spans}, 60)
    words = {word for line in lines for word in line.split()}
    assert {f"{name}={value}" for name, value in long.items()} <= words


def test_the_list_fits_80_columns_whole() -> None:
    facts = {"status": 200, "ttft_ms": 123456.7, "num_output_tokens": 123456}
    large = {"route": "/v1/chat/completions", "duration_ms": 999999.4, "attributes": facts}
    (_, row) = shown(show_list, [TRACE | large | {"id": "f" * 32}], 80)
    cells = ["f" * 32, "/chat/completions", "200", "999999", "123457", "123456"]
    assert row.split() == cells
    (_, *rows) = shown(show_list, [TRACE | large | {"id": "f" * 36}], 80)
    assert "…" not in "".join(rows), "a route is broken before it is cut"
    assert rows[0].split()[2:] == cells[2:]


def test_a_list_has_a_line_for_each_request() -> None:
    facts = {"status": 200, "ttft_ms": 12.34, "num_output_tokens": 7}
    head, *rows = shown(show_list, [TRACE | {"attributes": facts}, TRACE | {"attributes": {}}])
    assert head.split()[0] == "request"
    assert rows[0].split() == ["mine", "/completions", "200", "1000", "12.3", "7"]
    assert rows[1].split() == ["mine", "/completions", "1000", "–", "–"]


def test_an_id_of_a_client_is_no_markup(capsys) -> None:
    with console_for_people() as console:
        show_list([TRACE | {"id": "[red]a[/b]", "attributes": {}}], console)
    assert capsys.readouterr().out.splitlines()[1].split()[0] == "[red]a[/b]"
