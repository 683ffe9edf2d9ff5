"""A chat that exceeds its length limit, through all four services with a fake engine."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from tests.mesh.mesh import running_mesh

CHAT = "/v1/chat/completions"
LIMIT = 320
SYSTEM = {"role": "system", "content": "Answer in one sentence."}


async def ask(http: aiohttp.ClientSession, messages: list[Any], **fields: Any) -> tuple[int, Any]:
    """The number of dropped turns by the header, and the reply."""
    body = {"messages": messages, "max_tokens": 20, "temperature": 0} | fields
    async with http.post(CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        return int(response.headers.get("X-Shoal-Dropped-Turns", 0)), await response.json()


async def test_a_chat_goes_on_and_finds_its_beginning_in_the_cache(tmp_path: Path):
    async with (
        running_mesh(tmp_path) as mesh,
        aiohttp.ClientSession(mesh.url()) as http,
    ):
        messages, last_dropped, num_cuts = [SYSTEM], 0, 0
        for number in range(30):
            messages.append({"role": "user", "content": f"How many fish are there in {number}?"})
            num_dropped, reply = await ask(http, messages, history_limit=LIMIT)
            usage = reply["usage"]
            details = usage["prompt_tokens_details"]
            assert usage["prompt_tokens"] <= LIMIT
            assert details.get("dropped_turns", 0) == num_dropped
            if num_dropped == last_dropped and number:
                # Everything but the end of the prompt, an incomplete block, and the question.
                assert details["cached_tokens"] >= usage["prompt_tokens"] - 80
            num_cuts += num_dropped > last_dropped
            last_dropped = num_dropped
            content = reply["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": content})
        assert last_dropped > 10
        assert num_cuts < last_dropped / 1.5
        async with http.post("/tokenize", json={"messages": messages[:-1]}) as response:
            num_whole = (await response.json())["count"]
        assert details["dropped_tokens"] == num_whole - usage["prompt_tokens"]
        counted = {"messages": messages[:-1], "history_limit": LIMIT}
        async with http.post("/tokenize", json=counted) as response:
            assert (await response.json())["count"] == usage["prompt_tokens"]
        await mesh.until_idle()


async def test_a_replay_reports_the_turns_dropped_by_its_first_attempt(tmp_path: Path):
    turns = [
        message
        for number in range(20)
        for message in (
            {"role": "user", "content": f"How many fish are there in {number}?"},
            {"role": "assistant", "content": "Seven."},
        )
    ]
    messages = [SYSTEM, *turns, {"role": "user", "content": "And now?"}]
    async with (
        running_mesh(tmp_path) as mesh,
        aiohttp.ClientSession(mesh.url()) as http,
    ):
        fields = {"history_limit": 150, "max_tokens": 300, "ignore_eos": True}
        expected, whole = await ask(http, messages, **fields)
        assert expected > 5
        asking = asyncio.create_task(ask(http, messages, **fields))
        await mesh.until(lambda: any(len(s.emitted) > 20 for s in mesh.core.sequences.values()))
        await mesh.lose("tokenizer")
        mesh.start("tokenizer")
        num_dropped, reply = await asking
        assert num_dropped == expected
        details = reply["usage"]["prompt_tokens_details"]
        assert details["dropped_turns"] == expected
        assert (
            details["dropped_tokens"] == whole["usage"]["prompt_tokens_details"]["dropped_tokens"]
        )
        assert reply["choices"][0]["message"] == whole["choices"][0]["message"]
        await mesh.until_idle()
