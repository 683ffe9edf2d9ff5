"""`shoal bench serve` from its flags to its exit code."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from rich.console import Console

from cli.bench import command, report
from cli.bench.command import main
from cli.bench.figures import figures
from cli.bench.options import parse
from cli.bench.result import Result
from cli.bench.row import Row
from cli.exit_codes import INTERRUPTED
from tests.cli.bench.fake_server import MODEL, fake_server
from tests.cli.serving import serving

ROOT = Path(__file__).parent.parent.parent.parent


async def bench(url: str, *flags: str) -> int:
    arguments = ["serve", "--url", url, "--input-len", "5", "--output-len", "4", *flags]
    return await asyncio.to_thread(main, arguments)


async def test_a_run_ends_with_a_table_and_everything_as_json(tmp_path: Path, capsys):
    path = tmp_path / "run.json"
    flags = "--num-requests 12 --concurrency 3 --warmup 2 --goodput ttft=60000,tpot=60000 --rows"
    async with fake_server() as server:
        code = await bench(server.url, *flags.split(), "--api-key", "secret", "--json", str(path))
    assert code == 0
    text = capsys.readouterr().out
    for word in ("12 whole, 0 failed", MODEL, "TTFT", "TPOT", "ITL", "e2e", "P99", "goodput"):
        assert word in text
    assert "\x1b" not in text, "a pipe gets neither a bar nor colours"
    assert "sent late" not in text
    payload = json.loads(path.read_text())
    assert payload["model"] == MODEL
    assert payload["settings"]["concurrency"] == 3
    assert payload["settings"]["input_len"] == "5"
    assert payload["command"].startswith("shoal bench serve --url http://127.0.0.1:")
    assert "secret" not in path.read_text()
    assert {"date", "machine", "versions", "client"} <= set(payload)
    figures = payload["figures"]
    assert (figures["num_requests"], figures["num_failed"]) == (12, 0)
    assert (figures["input_tokens"], figures["output_tokens"]) == (7 * 12, 4 * 12)
    assert figures["goodput"]["share"] == 1
    assert set(figures["ttft_ms"]) == {"mean", "p50", "p90", "p99"}
    assert figures["late_ms"] is None
    assert len(payload["rows"]) == 12
    assert all(len(row["itls_s"]) == 3 and row["started_s"] >= 0 for row in payload["rows"])
    assert len(server.bodies) == 14
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == 14, "warm-up prompts are not repeated"
    assert main(["compare", str(path), str(path)]) == 0
    assert "ttft_ms.p99" in capsys.readouterr().out


async def test_failures_are_counted_and_named_and_the_rest_is_measured(tmp_path: Path, capsys):
    path = tmp_path / "run.json"
    async with fake_server({1: "refuse", 4: "error", 5: "refuse", 6: "short"}) as server:
        flags = ("--num-requests", "8", "--concurrency", "1", "--json", str(path))
        assert await bench(server.url, *flags) == 0
    text = capsys.readouterr().out
    assert "5 whole, 3 failed" in text
    assert "2 × 429: too many\n1 × 200: lost it" in text
    assert "warning: answers shorter than requested: 1" in text
    figures = json.loads(path.read_text())["figures"]
    assert figures["errors"] == {"429: too many": 2, "200: lost it": 1}
    assert "rows" not in json.loads(path.read_text())


async def test_names_are_shown_as_they_are(capsys):
    async with fake_server() as server:
        assert await bench(server.url, "--num-requests", "1", "--model", "[red]x[/blue]") == 0
    assert "[red]x[/blue]" in capsys.readouterr().out
    assert server.bodies[0]["model"] == "[red]x[/blue]"


async def test_the_exit_code_is_1_if_no_request_is_answered(capsys):
    async with fake_server({0: "crash", 1: "crash"}) as server:
        assert await bench(server.url, "--num-requests", "2") == 1
    text = capsys.readouterr().out
    assert "2 × 500: oh no" in text
    assert "–" in text


async def test_a_verdict_is_one_line_and_an_exit_code(tmp_path: Path, capsys):
    path = tmp_path / "run.json"
    flags = ("--verdict", "40", "--duration", "0.5", "--json", str(path))
    async with fake_server({3: "refuse"}) as server:
        assert await bench(server.url, *flags) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "does not keep up with 40 requests/s: at 60/s for 0.5 s, 1 of 30 requests"
    )
    assert json.loads(path.read_text())["verdict"]["keeps_up"] is False
    assert len(server.bodies) == 30


async def test_the_verdict_is_yes_where_nothing_speaks_against_it(
    monkeypatch: pytest.MonkeyPatch, capsys
):
    # This machine may stall, and tests with it.
    monkeypatch.setattr("cli.bench.verdict.MAX_GROWTH", 1e9)
    async with fake_server() as server:
        assert await bench(server.url, "--verdict", "40", "--duration", "0.5") == 0
    output = capsys.readouterr().out
    assert "sent late" in output
    assert output.splitlines()[-1].startswith("keeps up with 40 requests/s")


async def test_a_trace_is_asked_as_it_stands_in_order_of_its_times(tmp_path: Path):
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": word}], "max_tokens": num, "timestamp": at}
        for word, num, at in (("last", 3, 7.1), ("first", 1, 7.0), ("second", 2, 7.05))
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    async with fake_server() as server:
        flags = ("--endpoint", "chat", "--trace", str(trace), "--replay", "--concurrency", "1")
        assert await bench(server.url, *flags) == 0
    found = [(body["messages"][0]["content"], body["max_tokens"]) for body in server.bodies]
    assert found == [("first", 1), ("second", 2), ("last", 3)]


async def test_a_server_that_is_not_there_is_an_error_of_one_line(unused_tcp_port: int, capsys):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert await bench(url) == 2
    error = capsys.readouterr().err
    why = f"--url: {url}/v1/models does not answer: Connection refused"
    assert error == f"shoal bench serve: {why}\n"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], 0, "usage: shoal bench serve"),
        (["swim"], 2, "no such command: swim"),
        (["serve", "--num-requests", "0"], 2, "serve: --num-requests: '0' is not an integer"),
        (["serve", "--trace", "/no/such"], 2, "serve: --trace: cannot read /no/such"),
    ],
)
def test_mistyped_arguments_are_named(words: list[str], code: int, text: str, capsys):
    assert main(words) == code
    output = capsys.readouterr()
    assert text in output.out + output.err


def test_a_client_that_is_too_busy_is_reported(capsys):
    row = Row(0.0, 0.0, 1.0, "", 4, 7, 4, 0.5, [0.1] * 3)
    for cpu_s, is_warned in ((0.79, False), (0.9, True)):
        result = Result(parse([]), MODEL, [row], figures([row], {}, False), cpu_s)
        report.show(result, Console())
        assert ("warning: this client was busy for 90%" in capsys.readouterr().out) == is_warned


async def test_a_terminal_gets_a_bar_that_counts(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(command, "Console", lambda **_: Console(force_terminal=True, markup=False))
    async with fake_server({0: "crash"}) as server:
        assert await bench(server.url, "--num-requests", "5", "--concurrency", "1") == 0
    text = capsys.readouterr().out
    assert "5/5" in text
    assert "1 failed" in text


async def test_ctrl_c_ends_it_at_once():
    async with fake_server({0: "stall"}) as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", "from cli.main import main; main()"),
            *("bench", "serve", "--url", server.url),
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
            # A shell lets background processes, tests included, ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while not server.bodies:
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, error = await process.communicate()
    assert process.returncode == INTERRUPTED
    assert error == b"shoal bench serve: stopped before the end\n"


@pytest.mark.slow
async def test_shoal_itself_is_measured(tmp_path: Path, subtests: pytest.Subtests, capsys):
    async with serving(tmp_path / "mesh") as shoal:
        await shoal.until_ready()
        for endpoint in ("completions", "chat"):
            with subtests.test(endpoint=endpoint):
                path = tmp_path / f"{endpoint}.json"
                flags = f"--endpoint {endpoint} --num-requests 6 --concurrency 3 --logprobs 1"
                assert await bench(shoal.url, *flags.split(), "--json", str(path)) == 0
                payload = json.loads(path.read_text())
                assert payload["model"] == "shoal-tiny"
                assert payload["figures"]["num_failed"] == payload["figures"]["num_short"] == 0
                assert payload["figures"]["output_tokens"] == 24
                assert payload["figures"]["ttft_ms"]["mean"] > 0
