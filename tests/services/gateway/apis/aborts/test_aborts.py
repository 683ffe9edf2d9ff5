"""Ending a request by its client's id."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.apis.aborts.endpoint import MAX_BODY_BYTES
from shared.wire.envelope import read_options
from shared.wire.messages import RequestKey
from tests.services.gateway.fakes import FakeTokenizer, until
from tests.services.gateway.test_account import KEYS, finish, posting

TEXT = "/v1/completions"


async def abort(http: aiohttp.ClientSession, *ids: str) -> dict[str, list[str]]:
    async with http.post("/abort_requests", json={"request_ids": ids}) as response:
        assert response.status == 200
        reply: dict[str, list[str]] = await response.json()
        return reply


async def test_an_id_that_is_none_is_refused(http: aiohttp.ClientSession) -> None:
    """It would travel to every tokenizer."""
    async with http.post("/abort_requests", json={"request_ids": ["x" * 257]}) as response:
        assert response.status == 400
        assert "request_ids[0]" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("name", ["mine", "cmpl-mine", "chatcmpl-mine"])
async def test_every_choice_ends_with_its_partial_text(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, name: str
) -> None:
    body = {"prompt": "a", "n": 2, "request_id": "mine", "stream": True}
    posting = asyncio.create_task(http.post(TEXT, json=body).__aenter__())
    request = await tokenizer.accepted()
    request.text("x")
    response = await posting
    first = await response.content.readuntil(b"\n\n")
    assert json.loads(first[6:])["choices"][0]["text"] == "x"
    assert await abort(http, name) == {"aborted": [name], "forwarded": []}
    *events, done, _ = (await response.text()).split("\n\n")
    assert done == "data: [DONE]"
    assert [event.count('"finish_reason":"abort"') for event in events] == [1, 1]
    assert (await tokenizer.cancelled.get()).keys == [RequestKey(*request.key)]


async def test_a_request_ends_before_it_was_accepted_too(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    posting = asyncio.create_task(http.post(TEXT, json={"prompt": "a", "request_id": "mine"}))
    await tokenizer.submitted.get()
    assert await abort(http, "mine") == {"aborted": ["mine"], "forwarded": []}
    async with await posting as response:
        (choice,) = (await response.json())["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")


async def test_aborts_of_other_gateways_are_passed_on(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    reply = await abort(http, "theirs", "cmpl-nobodys")
    assert reply == {"aborted": [], "forwarded": ["theirs", "cmpl-nobodys"]}
    while "nobodys" not in tokenizer.aborted:
        await asyncio.sleep(0.005)
    assert "theirs" in tokenizer.aborted


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "request_ids"),
        ({"request_ids": "a"}, "request_ids"),
        ({"request_ids": [1]}, "request_ids[0]"),
        ({"request_ids": ["a"] * 1025}, "request_ids"),
    ],
)
async def test_a_wrong_list_of_ids_is_refused(
    http: aiohttp.ClientSession, body: dict[str, Any], param: str
) -> None:
    async with http.post("/abort_requests", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == param


async def test_a_body_beyond_the_limit_of_aborts_is_413(http: aiohttp.ClientSession) -> None:
    async with http.post(
        "/abort_requests", data=io.BytesIO(b"x" * (MAX_BODY_BYTES + 1))
    ) as response:
        assert response.status == 413


async def test_a_key_aborts_only_its_own_requests(tmp_path: Path, tokenizer: FakeTokenizer) -> None:
    async with posting(tmp_path) as post:
        tasks = [post(key, prompt="a", request_id="same") for key in KEYS]
        requests = [await tokenizer.accepted() for _ in KEYS]
        assert len({read_options(request.submit.options).owner for request in requests}) == 2
        theirs = post("bob", prompt="a", request_id="of-bob")
        request = await tokenizer.accepted()
        async with await post(
            "ada", "/abort_requests", request_ids=["same", "of-bob", "of-nobody"]
        ) as response:
            reply = await response.json()
        assert reply == {"aborted": ["same"], "forwarded": ["of-bob", "of-nobody"]}
        async with await tasks[0] as response:
            assert (await response.json())["choices"][0]["finish_reason"] == "abort"
        await until(lambda: tokenizer.aborted == ["of-bob", "of-nobody"])
        assert tokenizer.abort_owners == [read_options(requests[0].submit.options).owner]
        await finish(theirs, request)
        await finish(tasks[1], requests[1])


async def test_a_body_that_does_not_claim_to_be_json_is_415(http: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "text/plain"}
    async with http.post("/abort_requests", data=b"{}", headers=headers) as response:
        assert response.status == 415
