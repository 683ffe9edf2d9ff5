"""The client against a scripted server; both share a loop and a clock."""

import numpy as np
import pytest

from cli.bench.arrivals import all_at_once, at_rate
from cli.bench.client import MAX_CLOSED, client, offer
from cli.bench.options import parse
from cli.bench.row import Row
from cli.bench.workload import Request, random_requests
from shared.errors import ConfigError
from tests.cli.bench.fake_server import MODEL, FakeServer, fake_server

SHORT = "--input-len 5 --output-len 4"


async def ask(server: FakeServer, flags: str = "", num: int = 1) -> list[Row]:
    """All at once, as far as the settings allow."""
    settings = parse(["--url", server.url, *SHORT.split(), *flags.split()])
    requests = random_requests(settings, MODEL, num, np.random.default_rng(0))
    async with client(settings) as asking:
        return await offer(requests, all_at_once(num), settings.max_open, asking.send)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_times_are_taken_after_the_server_wrote(endpoint: str):
    async with fake_server(gap_s=0.01) as server:
        (row,) = await ask(server, f"--endpoint {endpoint}")
    written_s = server.written_s[0]
    assert row.error == ""
    assert (row.input_tokens, row.output_tokens, len(row.itls_s)) == (7, 4, 3)
    assert row.started_s <= server.received_s[0]
    first_s = row.started_s + row.ttft_s
    assert first_s >= written_s[0]
    assert first_s + sum(row.itls_s) >= written_s[-1]
    assert row.ended_s >= first_s + sum(row.itls_s)
    assert all(gap_s >= 0 for gap_s in row.itls_s)


async def test_tokens_are_seen_when_they_come_and_not_at_the_end():
    async with fake_server(gap_s=0.05) as server:
        (row,) = await ask(server, "--endpoint chat")
    assert row.started_s + row.ttft_s < server.written_s[0][-1]


WAYS = {
    "refuse": "429: too many",
    "crash": "500: oh no",
    "error": "200: lost it",
    "cut": "",  # a reset or an early end, depending on the network
    "no-done": "200: the stream ended without [DONE]",
    "no-usage": "200: the stream has no usage",
}


@pytest.mark.parametrize(("way", "error"), WAYS.items())
async def test_a_request_that_fails_reports_how_and_harms_no_other(way: str, error: str):
    async with fake_server({1: way}) as server:
        rows = await ask(server, "--concurrency 1", 3)
    assert rows[1].error
    assert error in rows[1].error
    assert [row.error for row in (rows[0], rows[2])] == ["", ""]


async def test_where_a_connection_ends_before_an_answer_another_is_tried():
    async with fake_server({1: "hang up", 2: "hang up"}) as server:
        rows = await ask(server, "--concurrency 1", 3)
        assert len(server.bodies) == 5
    assert [row.error for row in rows] == ["", "", ""]


async def test_a_server_that_hangs_up_again_and_again_fails_the_request():
    async with fake_server(dict.fromkeys(range(MAX_CLOSED + 1), "hang up")) as server:
        (row,) = await ask(server)
        assert len(server.bodies) == MAX_CLOSED + 1
    assert "disconnected" in row.error


async def test_one_that_stalls_fails_after_the_time_that_was_set():
    async with fake_server({0: "stall"}) as server:
        rows = await ask(server, "--timeout 0.2", 2)
    errors = [row.error for row in rows]
    assert "" in errors
    assert any("imeout" in error for error in errors)


async def test_a_server_that_is_not_there_fails_each_request(unused_tcp_port: int):
    server = FakeServer()
    server.url = f"http://127.0.0.1:{unused_tcp_port}"
    rows = await ask(server, num=2)
    assert all(row.error == "Connection refused" for row in rows)


async def test_a_closed_loop_keeps_as_many_open_as_it_may_and_no_more():
    async with fake_server(gap_s=0.001) as server:
        server.hold_until_open = 3
        rows = await ask(server, "--concurrency 3", 12)
    assert server.max_open == 3
    assert len(rows) == 12
    assert not any(row.error for row in rows)


async def test_at_a_rate_none_is_sent_before_its_time_and_none_waits_for_answers():
    settings = parse(["--request-rate", "100"])
    times = at_rate(10, 100, 1.0, np.random.default_rng(0))
    async with fake_server() as server:
        server.hold_until_open = 10
        asking = parse(["--url", server.url])
        async with client(asking) as target:
            requests = [Request(b'{"max_tokens": 2}', 2)] * 10
            rows = await offer(requests, times, settings.max_open, target.send)
    assert server.max_open == 10
    dues = [row.due_s - rows[0].due_s for row in rows]
    assert dues == pytest.approx((times - times[0]).tolist(), abs=1e-6)
    assert all(row.started_s >= row.due_s for row in rows)


async def test_the_key_is_shown_and_the_model_is_the_first_of_the_list():
    async with fake_server() as server:
        settings = parse(["--url", f"{server.url}/v1/", "--api-key", "secret"])
        async with client(settings) as target:
            assert await target.model() == MODEL
            await target.send(Request(b'{"max_tokens": 1}', 1), 0.0)
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.headers[0]["Accept-Encoding"] == "identity"
    assert server.headers[0]["Content-Type"] == "application/json"


async def test_a_server_that_lists_no_model_is_a_config_error():
    async def model(flags: list[str]) -> str:
        async with client(parse(flags)) as target:
            return await target.model()

    async with fake_server() as server:
        with pytest.raises(ConfigError, match=r"--model: .*/nowhere/v1/models lists no model: 404"):
            await model(["--url", f"{server.url}/nowhere"])
    with pytest.raises(ConfigError, match=r"--url: .*/v1/models does not answer"):
        await model(["--url", server.url])
