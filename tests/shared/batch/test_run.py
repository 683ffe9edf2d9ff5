"""A batch against a scripted server, over real sockets."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from shared.batch.check import check
from shared.batch.results import ResultFile
from shared.batch.run import BatchRun, Counts, Plan, read_results
from shared.client.sender import KeyRefused, Sender, ServerLost
from tests.shared.batch.test_lines import line, write

LIMIT = 10_000
ANSWER = {"usage": {"prompt_tokens": 2, "completion_tokens": 3}}

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(handle: Handle) -> AsyncIterator[aiohttp.ClientSession]:
    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as session:
        yield session
    await runner.cleanup()


async def run(
    path: Path, session: aiohttp.ClientSession, num_at_once: int = 4, **options: Any
) -> tuple[list[dict[str, Any]], Counts]:
    """The results, and their counts."""
    checked = check(path, LIMIT)
    counts = Counts(checked.num_requests)
    priority = options.pop("priority", None)
    sender = Sender(session, **({"retry_s": 0.0, "timeout_s": 20.0} | options))
    with ResultFile(path.with_suffix(".out"), checked.digest) as file:
        done = read_results((file,), checked.num_lines, counts)
        plan = Plan(path, checked.digest, LIMIT, checked.num_lines, priority=priority)
        try:
            await BatchRun(plan, file, file, counts, done, sender.send).run(num_at_once)
        finally:
            texts = path.with_suffix(".out").read_text().splitlines()
    return [json.loads(text) for text in texts], counts


async def test_each_line_gets_one_result_and_so_many_are_open_at_once(tmp_path: Path):
    num_open, most, are_all_open = 0, 0, asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        if num_open == 7:
            are_all_open.set()
        await are_all_open.wait()
        num_open -= 1
        return web.json_response(ANSWER | {"got": await request.json()})

    lines = [line(str(n), body={"n": n}) for n in range(200)]
    async with server(handle) as session:
        results, counts = await run(write(tmp_path / "in", *lines), session, num_at_once=7)
    assert most == 7
    assert {each["custom_id"]: each["response"]["body"]["got"]["n"] for each in results} == {
        str(n): n for n in range(200)
    }
    assert (counts.total, counts.completed, counts.failed) == (200, 200, 0)
    assert (counts.num_prompt_tokens, counts.num_output_tokens) == (400, 600)


async def test_a_line_that_fails_stops_no_other(tmp_path: Path):
    async def handle(request: web.Request) -> web.Response:
        if (await request.json())["n"] == 2:
            return web.Response(status=500, text="<html>\nno\n")
        return web.json_response(ANSWER)

    lines = [line("a", body={"n": 1}), "{", line("b", body={"n": 2}), line("c", body={"n": 3})]
    async with server(handle) as session:
        results, counts = await run(write(tmp_path / "in", *lines), session)
    found = {each["custom_id"]: each for each in results}
    assert set(found) == {"a", "b", "c", None}
    assert found["b"]["response"]["status_code"] == 500
    assert found["b"]["response"]["body"]["error"]["message"] == "<html>\nno\n"
    assert found[None]["error"]["code"] == "invalid_json_line"
    assert (counts.completed, counts.failed) == (2, 2)


async def test_temporary_errors_are_retried(tmp_path: Path):
    num_tries: Counter[int] = Counter()

    async def handle(request: web.Request) -> web.StreamResponse:
        number = (await request.json())["n"]
        num_tries[number] += 1
        if num_tries[number] < 3 and number < 3:
            if number == 1:
                request.transport.abort()
            return web.json_response({}, status=429, headers={"Retry-After": "0"})
        if number == 3:
            return web.json_response({}, status=503, headers={"X-Should-Retry": "false"})
        return web.json_response(ANSWER)

    lines = [line(str(n), body={"n": n}) for n in range(1, 4)]
    async with server(handle) as session:
        results, _ = await run(write(tmp_path / "in", *lines), session, retry_s=20.0)
    statuses = {each["custom_id"]: each["response"]["status_code"] for each in results}
    assert statuses == {"1": 200, "2": 200, "3": 503}
    assert num_tries == {1: 3, 2: 3, 3: 1}


async def test_a_refusal_that_lasts_is_the_result(tmp_path: Path):
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "overloaded"}}, status=429)

    async with server(handle) as session:
        results, _ = await run(write(tmp_path / "in", line()), session)
    assert results[0]["response"]["status_code"] == 429


async def test_a_line_that_never_gets_a_reply_is_an_error_while_the_server_lives(tmp_path: Path):
    async def handle(request: web.Request) -> web.Response:
        if (await request.json())["n"] == 1:
            await asyncio.sleep(60)
        request.transport.abort()
        return web.Response()

    lines = [line("slow", body={"n": 1}), line("cut", body={"n": 2})]
    async with server(handle) as session:
        results, _ = await run(write(tmp_path / "in", *lines), session, timeout_s=0.2)
    assert {each["custom_id"]: each["error"]["code"] for each in results} == {
        "slow": "no_reply",
        "cut": "no_reply",
    }


async def test_without_a_server_it_stops_and_goes_on_with_one(tmp_path: Path):
    path = write(tmp_path / "in", *(line(str(n)) for n in range(20)))

    async with aiohttp.ClientSession("http://127.0.0.1:9") as session:
        with pytest.raises(ExceptionGroup) as caught:
            await run(path, session)
    assert caught.group_contains(ServerLost, match="does not answer")

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(ANSWER)

    async with server(answer) as session:
        results, _ = await run(path, session)
        assert Counter(each["custom_id"] for each in results) == {str(n): 1 for n in range(20)}
        again, counts = await run(path, session)
    assert again == results
    assert (counts.completed, counts.num_output_tokens) == (20, 0)


async def test_a_wrong_key_stops_it_before_it_has_an_error_for_each_line(tmp_path: Path):
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({}, status=401)

    path = write(tmp_path / "in", *(line(str(n)) for n in range(20)))
    async with server(handle) as session:
        with pytest.raises(ExceptionGroup) as caught:
            await run(path, session)
    assert caught.group_contains(KeyRefused)
    assert path.with_suffix(".out").read_text() == ""


@pytest.mark.parametrize(
    ("own", "sent"), [({}, 100), ({"priority": 3}, 100), ({"priority": 500}, 500)]
)
async def test_a_priority_is_given_but_none_that_is_later_taken(
    tmp_path: Path, own: dict[str, int], sent: int
):
    async def handle(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    async with server(handle) as session:
        path = write(tmp_path / "in", line(body={"prompt": "x", **own}))
        results, _ = await run(path, session, priority=100)
    assert results[0]["response"]["body"] == {"prompt": "x", "priority": sent}
