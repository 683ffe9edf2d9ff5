"""An OpenAI-compatible server with scripted answers and times."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from aiohttp import web

MODEL = "fake"


class FakeServer:
    """Answers ``max_tokens`` chunks of one token. ``ways`` lists exceptions by number (from 0, in
    order of arrival):

    refuse       429 with OpenAI's error object
    crash        500 with a text
    error        two tokens, then an event with an error
    stall        two tokens, then nothing
    cut          two tokens, then the connection is closed
    no-done      everything but [DONE]
    no-usage     everything but the usage
    short        one token less than requested
    """

    def __init__(self, ways: Mapping[int, str] | None = None, gap_s: float = 0.0) -> None:
        self.url = ""
        self.ways = ways or {}
        self.gap_s = gap_s
        self.bodies: list[dict] = []
        self.headers: list[Mapping[str, str]] = []
        self.received_s: list[float] = []
        self.written_s: dict[int, list[float]] = {}  # of each chunk with a token
        self.num_open = 0
        self.max_open = 0
        self.hold_until_open = 0  # answers wait until this number of requests is open
        self._changed = asyncio.Condition()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL}, {"id": "other"}]})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        number = len(self.bodies)
        self.received_s.append(perf_counter())
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        async with self._changed:
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self.max_open >= self.hold_until_open)
        try:
            return await self._answer(request, number)
        finally:
            self.num_open -= 1

    async def _answer(self, request: web.Request, number: int) -> web.StreamResponse:
        way = self.ways.get(number, "well")
        if way == "refuse":
            return web.json_response({"error": {"message": "too many"}}, status=429)
        if way == "crash":
            return web.Response(text="oh no", status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if way == "hang up":
            assert request.transport is not None
            request.transport.close()
            return response
        await response.prepare(request)
        num_tokens = self.bodies[number]["max_tokens"] - (way == "short")
        is_whole = way not in ("error", "stall", "cut")
        await self._write_tokens(response, number, num_tokens if is_whole else 2)
        if way == "error":
            await self._write(response, {"error": {"message": "lost it", "code": 500}})
        elif way == "stall":
            await asyncio.Event().wait()
        elif way == "cut":
            assert request.transport is not None
            request.transport.abort()
        if is_whole and way != "no-usage":
            usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
            await self._write(response, {"choices": [], "usage": usage})
        if is_whole and way != "no-done":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _write_tokens(self, response: web.StreamResponse, number: int, num: int) -> None:
        is_chat = "messages" in self.bodies[number]
        times = self.written_s.setdefault(number, [])
        if is_chat:
            role = {"role": "assistant", "content": ""}
            await self._write(response, {"choices": [{"index": 0, "delta": role}]})
        for index in range(num):
            await asyncio.sleep(self.gap_s)
            choice: Any = {"delta": {"content": "a"}} if is_chat else {"text": "a"}
            choice["finish_reason"] = "length" if index == num - 1 else None
            times.append(perf_counter())
            await self._write(response, {"choices": [choice], "usage": None})

    async def _write(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def fake_server(
    ways: Mapping[int, str] | None = None, gap_s: float = 0.0
) -> AsyncIterator[FakeServer]:
    server = FakeServer(ways, gap_s)
    app = web.Application(client_max_size=1 << 28)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.answer)
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server
    finally:
        await runner.cleanup()
