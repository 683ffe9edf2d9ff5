"""A client that uses all its API key allows: stores, batches, threads and connections.

``python -m benchmarks.harness.hostile_key URL KEY NUM KIND …`` runs ``NUM`` clients of each kind
until its stdin ends, and then prints the number of answers by status for each kind. It takes the
processor time that others leave, since real clients have machines of their own.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

import aiohttp
import uvloop

MODEL = "shoal-tiny"
NUM_BYTES = 1_000_000
TEXT_BYTES = 6000  # longer texts may be refused unread
NUM_LINES = 300
UNREAD_S = 10.0
PAUSE_S = 0.1
"""Pause after a refusal."""
WORDS = "the shoal turns as one, and no fish gives the order. "

Ask = Callable[[aiohttp.ClientSession], Awaitable[int]]


async def _post(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> int:
    async with session.post(path, json=body) as response:
        await response.read()
        return response.status


async def stored_response(session: aiohttp.ClientSession) -> int:
    """Stores a megabyte, nearly all of it outside the prompt."""
    item = {"type": "reasoning", "encrypted_content": "x" * NUM_BYTES, "summary": []}
    asked = [item, {"role": "user", "content": "Hi"}]
    body = {"model": MODEL, "input": asked, "max_output_tokens": 1}
    return await _post(session, "/v1/responses", body)


async def background(session: aiohttp.ClientSession) -> int:
    body = {"model": MODEL, "input": WORDS, "background": True, "max_output_tokens": 1000}
    return await _post(session, "/v1/responses", body)


async def tokenize(session: aiohttp.ClientSession) -> int:
    text = WORDS * (TEXT_BYTES // len(WORDS))
    return await _post(session, "/tokenize", {"model": MODEL, "prompt": text})


async def long_prompts(session: aiohttp.ClientSession) -> int:
    body = {"model": MODEL, "prompt": [WORDS * 30] * 4, "max_tokens": 100}
    return await _post(session, "/v1/completions", body)


async def files(session: aiohttp.ClientSession) -> int:
    """An upload, its download and a list."""
    status, file_id = await _upload(session, b"x" * NUM_BYTES)
    if status != 200:
        return status
    for path in (f"/v1/files/{file_id}/content", "/v1/files"):
        async with session.get(path) as response:
            await response.read()
    return response.status


async def batches(session: aiohttp.ClientSession) -> int:
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": 64, "ignore_eos": True}
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number in range(NUM_LINES)
    ]
    status, file_id = await _upload(session, "\n".join(map(json.dumps, lines)).encode())
    if status != 200:
        return status
    asked = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file_id}
    return await _post(session, "/v1/batches", asked)


async def _upload(session: aiohttp.ClientSession, data: bytes) -> tuple[int, str]:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", data, filename="in.jsonl")
    async with session.post("/v1/files", data=form) as response:
        found = await response.json(content_type=None)
    return response.status, found.get("id", "")


async def unread_stream(session: aiohttp.ClientSession) -> int:
    """A stream whose client reads only the head for some seconds."""
    body = {"model": MODEL, "prompt": WORDS, "max_tokens": 2000, "ignore_eos": True, "n": 8}
    asked = session.post("/v1/completions", json=body | {"stream": True, "logprobs": 20})
    async with asked as response:
        if response.status == 200:
            await asyncio.sleep(UNREAD_S)
        response.close()
        return response.status


KINDS: dict[str, Ask] = {
    "stored responses": stored_response,
    "background": background,
    "tokenize": tokenize,
    "long prompts": long_prompts,
    "files": files,
    "batches": batches,
    "unread streams": unread_stream,
}


class HostileKey:
    """``answers`` counts each kind of request and status; 0: the connection was closed."""

    def __init__(
        self, url: str, key: str, num_clients: int, kinds: Collection[str] = KINDS.keys()
    ) -> None:
        """``num_clients`` clients of each kind."""
        self.answers: Counter[tuple[str, int]] = Counter()
        self._url = url
        self._key = key
        self._num_clients = num_clients
        self._kinds = kinds

    async def run(self) -> None:
        """Runs until cancelled."""
        headers = {"Authorization": f"Bearer {self._key}"}
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(self._url, headers=headers, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for name in self._kinds:
                for _ in range(self._num_clients):
                    tasks.create_task(self._ask_on(session, name))

    async def _ask_on(self, session: aiohttp.ClientSession, name: str) -> None:
        while True:
            status = 0
            with suppress(aiohttp.ClientError, OSError, IndexError, ValueError):
                status = await KINDS[name](session)
            self.answers[name, status] += 1
            if status != 200:
                await asyncio.sleep(PAUSE_S)


async def main(url: str, key: str, num_clients: int, kinds: Collection[str]) -> None:
    client = HostileKey(url, key, num_clients, kinds)
    running = asyncio.create_task(client.run())
    await asyncio.wait(
        [running, asyncio.create_task(asyncio.to_thread(sys.stdin.read))],
        return_when=asyncio.FIRST_COMPLETED,
    )
    if running.done():
        running.result()
    running.cancel()
    await asyncio.wait([running])
    statuses: dict[str, dict[str, int]] = {}
    for (name, status), num in sorted(client.answers.items()):
        statuses.setdefault(name, {})[str(status)] = num
    print(json.dumps(statuses))


if __name__ == "__main__":
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    uvloop.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
