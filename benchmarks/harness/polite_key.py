"""A client with its own API key that sends few requests and checks their service."""

import asyncio
import json
import time
from typing import Any

import aiohttp

from benchmarks.harness.hostile_key import MODEL

STREAM: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is 12 + 30?"}],
}
STREAM |= {"max_tokens": 8, "temperature": 0, "stream": True}
POLL_S = 0.1
ENDED = ("completed", "failed", "expired", "cancelled", "incomplete")


class PoliteKey:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        """``session`` has the server's URL and the key. Methods raise ClientResponseError."""
        self._session = session

    async def first_token_s(self) -> float:
        started_s = time.perf_counter()
        first_s = 0.0
        async with self._session.post("/v1/chat/completions", json=STREAM) as response:
            response.raise_for_status()
            async for line in response.content:
                has_text = b'"content":"' in line and b'"content":""' not in line
                if has_text and not first_s:
                    first_s = time.perf_counter() - started_s
        return first_s

    async def store(self, **more: Any) -> str:
        """The id of a stored response."""
        body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4} | more
        return str((await self._ask("POST", "responses", json=body))["id"])

    async def num_lost(self, ids: list[str]) -> int:
        lost = 0
        for response_id in ids:
            async with self._session.get(f"/v1/responses/{response_id}") as response:
                lost += response.status != 200
        return lost

    async def status_at_end(self, response_id: str) -> str:
        """The final status of a response in the background."""
        while (found := await self._ask("GET", f"responses/{response_id}"))["status"] not in ENDED:
            await asyncio.sleep(POLL_S)
        return str(found["status"])

    async def start_batch(self, num_lines: int) -> str:
        body = {"model": MODEL, "prompt": "The", "max_tokens": 4}
        lines = [
            {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
            for number in range(num_lines)
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        data = "\n".join(map(json.dumps, lines)).encode()
        form.add_field("file", data, filename="in.jsonl")
        file_id = (await self._ask("POST", "files", data=form))["id"]
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        asked["input_file_id"] = file_id
        return str((await self._ask("POST", "batches", json=asked))["id"])

    async def batch_at_end(self, batch_id: str) -> dict[str, Any]:
        while (found := await self._ask("GET", f"batches/{batch_id}"))["status"] not in ENDED:
            await asyncio.sleep(POLL_S)
        return found

    async def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        async with self._session.request(method, f"/v1/{path}", **more) as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
            return found
