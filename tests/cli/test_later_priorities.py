"""A request of a later priority next to a stream, in a mesh of processes."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cli.serving import serving

LATER = {"prompt": "import", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


async def ask(http: aiohttp.ClientSession, name: str, **body: Any) -> str:
    headers = {"X-Request-Id": name}
    async with http.post("/v1/completions", json=LATER | body, headers=headers) as response:
        assert response.status == 200, await response.text()
        text: str = (await response.json())["choices"][0]["text"]
        return text


async def facts_of(http: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    """The scheduler's facts about an ended request."""
    async with http.get(f"/v1/traces/{name}") as response:
        spans = (await response.json())["spans"]
    (facts,) = (span["attributes"] for span in spans if span["name"] == "sequence")
    return facts


@pytest.mark.slow
async def test_it_is_held_back_while_the_stream_is_computed_and_gets_the_same_text(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path, "--later-priority-share", "0.01") as server,
        aiohttp.ClientSession(server.url) as http,
    ):
        await server.until_ready()
        alone = await ask(http, "alone", priority=100)
        body = LATER | {"prompt": "def", "max_tokens": 900, "stream": True}
        async with http.post(
            "/v1/completions", json=body, headers={"X-Request-Id": "stream"}
        ) as stream:
            await stream.content.readline()
            later = asyncio.create_task(ask(http, "later", priority=100))
            async for _ in stream.content:
                pass
        assert await later == alone
        facts = {name: await facts_of(http, name) for name in ("alone", "stream", "later")}
    assert facts["stream"]["num_output_tokens"] == 900
    assert facts["alone"]["num_held_back"] == facts["stream"]["num_held_back"] == 0
    assert facts["later"]["num_held_back"] > 0
