"""Ending a request by its client's id."""

import io
import json
from typing import Any

import pytest

from services.gateway.apis.aborts.endpoint import MAX_BODY_BYTES
from shared.wire.envelope import read_options
from shared.wire.messages import RequestKey
from tests.services.gateway.client import TEXT, Client, with_settings
from tests.services.gateway.fakes import until

PATH = "/abort_requests"
KEYS = ["ada", "bob"]


async def abort(client: Client, *ids: str, key: str = "") -> dict[str, list[str]]:
    answer = await client.post(PATH, key=key, request_ids=ids)
    assert answer.status == 200
    reply: dict[str, list[str]] = answer.json
    return reply


@pytest.mark.parametrize("name", ["mine", "cmpl-mine", "chatcmpl-mine"])
async def test_every_choice_ends_with_its_partial_text(client: Client, name: str) -> None:
    response, request = await client.streaming(TEXT, n=2, request_id="mine")
    first = await response.content.readuntil(b"\n\n")
    assert json.loads(first[6:])["choices"][0]["text"] == "x"
    assert await abort(client, name) == {"aborted": [name], "forwarded": []}
    *events, done, _ = (await response.text()).split("\n\n")
    assert done == "data: [DONE]"
    assert [event.count('"finish_reason":"abort"') for event in events] == [1, 1]
    assert (await client.tokenizer.cancelled.get()).keys == [RequestKey(*request.key)]


async def test_a_request_ends_before_it_was_accepted_too(client: Client) -> None:
    asked, _ = await client.begun(TEXT, prompt="a", request_id="mine")
    assert await abort(client, "mine") == {"aborted": ["mine"], "forwarded": []}
    (choice,) = (await asked).choices
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")


async def test_aborts_of_other_gateways_are_passed_on(client: Client) -> None:
    reply = await abort(client, "theirs", "cmpl-nobodys")
    assert reply == {"aborted": [], "forwarded": ["theirs", "cmpl-nobodys"]}
    await until(lambda: {"nobodys", "theirs"} <= {*client.tokenizer.aborted})


@pytest.mark.parametrize(
    ("ids", "param"),
    [
        (None, "request_ids"),
        ("a", "request_ids"),
        ([1], "request_ids[0]"),
        (["x" * 257], "request_ids[0]"),  # it would travel to every tokenizer
        (["a"] * 1025, "request_ids"),
    ],
    ids=["none", "text", "number", "length", "count"],
)
async def test_a_wrong_list_of_ids_is_refused(client: Client, ids: Any, param: str) -> None:
    body = {} if ids is None else {"request_ids": ids}
    assert (await client.refused(400, PATH, **body))["param"] == param


async def test_a_body_beyond_the_limit_of_aborts_is_413(client: Client) -> None:
    data = io.BytesIO(b"x" * (MAX_BODY_BYTES + 1))
    assert (await client.send("POST", PATH, data=data)).status == 413


async def test_a_body_that_does_not_claim_to_be_json_is_415(client: Client) -> None:
    headers = {"Content-Type": "text/plain"}
    assert (await client.send("POST", PATH, data=b"{}", headers=headers)).status == 415


@with_settings(api_key=KEYS)
async def test_a_key_aborts_only_its_own_requests(client: Client) -> None:
    asked = [await client.accepted(TEXT, key=key, prompt="a", request_id="same") for key in KEYS]
    owners = [read_options(request.submit.options).owner for _, request in asked]
    assert len({*owners}) == 2
    theirs = await client.accepted(TEXT, key="bob", prompt="a", request_id="of-bob")
    reply = await abort(client, "same", "of-bob", "of-nobody", key="ada")
    assert reply == {"aborted": ["same"], "forwarded": ["of-bob", "of-nobody"]}
    assert (await asked[0][0]).choices[0]["finish_reason"] == "abort"
    await until(lambda: client.tokenizer.aborted == ["of-bob", "of-nobody"])
    assert client.tokenizer.abort_owners == owners[:1]
    for each in (theirs, asked[1]):
        await client.finish(*each)
