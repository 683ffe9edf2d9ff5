"""Requests of other APIs end by the ids that their clients know."""

import asyncio
import json
from pathlib import Path

import aiohttp

from tests.services.gateway.apis.messages.test_messages import post, read_message
from tests.services.gateway.apis.pooling.test_pooling import embed, mesh, pool
from tests.services.gateway.apis.responses.event_order import check_events, parsed_events
from tests.services.gateway.apis.responses.test_responses import ASKED, ROUTE
from tests.services.gateway.fakes import FakeTokenizer, Submitted


async def test_an_aborted_request_says_so(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (http, tokenizer, _):
        asked = asyncio.create_task(embed(http, 2, request_id="mine"))
        requests = [await tokenizer.accepted() for _ in range(2)]
        pool(requests[0])
        async with http.post("/abort_requests", json={"request_ids": ["mine"]}) as response:
            assert (await response.json())["aborted"] == ["mine"]
        status, reply = await asked
        assert (status, reply["error"]["code"]) == (400, "request_aborted")


async def test_a_message_can_be_aborted_by_its_id(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
):
    asking = asyncio.create_task(post(http, stream=True))
    request: Submitted = await tokenizer.accepted()
    public_id = request.submit.request.partition("~")[0]
    async with http.post("/abort_requests", json={"request_ids": [f"msg_{public_id}"]}) as reply:
        assert (await reply.json())["aborted"] == [f"msg_{public_id}"]
    _, _, body = await asking
    assert read_message(body)["stop_reason"] == "end_turn"


async def test_a_response_can_be_aborted_by_its_id(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    posting = asyncio.create_task(http.post(ROUTE, json=ASKED | {"stream": True}))
    await tokenizer.accepted()
    response = await posting
    lines = [(await response.content.readline()).decode() for _ in range(2)]
    response_id = json.loads(lines[1].removeprefix("data: "))["response"]["id"]
    async with http.post("/abort_requests", json={"request_ids": [response_id]}) as aborting:
        assert (await aborting.json())["aborted"] == [response_id]
    rest = (await response.read()).decode()
    assert check_events(parsed_events("".join(lines) + rest))["status"] == "cancelled"
