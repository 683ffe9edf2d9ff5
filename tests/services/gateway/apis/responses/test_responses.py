"""/v1/responses over HTTP: storage by owner, errors, ends."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.apis.responses.requests.reasoning_cipher import ReasoningCipher
from services.gateway.service import GatewayService
from tests.services.gateway.apis.responses.event_order import check_events, parsed_events
from tests.services.gateway.client import Client, with_settings
from tests.services.gateway.fakes import NUM_PROMPT_TOKENS

ROUTE = "/v1/responses"
ASKED: dict[str, Any] = {"input": "Hi"}
STORE = {"response_store": Path("store.db")}
STORED = with_settings(**STORE)


async def post(client: Client, *texts: str, **fields: Any) -> Any:
    """A reply of ``texts``."""
    answer, submitted = await client.answered(ROUTE, *texts, **ASKED | fields)
    return answer.json | {"messages": json.loads(submitted.prompt.tobytes())}


async def failure(client: Client, method: str, path: str, **more: Any) -> Any:
    answer = await client.send(method, ROUTE + path, **more)
    return answer.status, answer.error


def text_of(reply: Any) -> str:
    text: str = reply["output"][-1]["content"][0]["text"]
    return text


def response_in(stream: str) -> dict[str, Any]:
    return check_events(parsed_events(stream))


@STORED
async def test_a_conversation_goes_on_from_the_stored_response(client: Client) -> None:
    first = await post(client, "Hello", "!", instructions="Be short.")
    assert first["store"] is True
    second = await post(client, "Yes.", previous_response_id=first["id"], input="Well?")
    third = await post(client, "No.", previous_response_id=second["id"], input="Sure?")
    texts = ["Hi", "Hello!", "Well?", "Yes.", "Sure?"]
    assert [message["content"] for message in third["messages"]] == texts
    roles = ["user", "assistant", "user", "assistant", "user"]
    assert [message["role"] for message in third["messages"]] == roles
    path = f"/{second['id']}"
    del second["messages"]
    assert (await client.get(ROUTE + path)).json == second
    deleted = await client.send("DELETE", ROUTE + path)
    assert deleted.json == {"id": second["id"], "object": "response", "deleted": True}
    status, error = await failure(client, "GET", path)
    assert (status, error["code"]) == (404, "not_found")
    error = await client.refused(400, ROUTE, **ASKED, previous_response_id=third["id"])
    assert error["code"] == "previous_response_not_found"
    assert second["id"] in error["message"]


@STORED
async def test_items_can_be_referred_to(client: Client) -> None:
    first = await post(client, "Hello")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    more = {"role": "user", "content": "And?"}
    second = await post(client, "Well.", input=[reference, more])
    assert second["messages"] == [{"role": "assistant", "content": "Hello"}, more]
    fields = {"input": [more, {"type": "item_reference", "id": "msg_fish"}]}
    assert (await client.refused(400, ROUTE, **fields))["param"] == "input[1].id"


@with_settings(**STORE, max_body_bytes=10_000)
async def test_the_responses_of_references_have_a_limit_of_bytes(client: Client) -> None:
    replies = [await post(client, "x" * 6000) for _ in range(2)]
    items = [{"type": "item_reference", "id": each["output"][0]["id"]} for each in replies]
    await post(client, "Well.", input=items[:1])
    error = await client.refused(400, ROUTE, input=items)
    assert error["param"] == "input"
    assert "max-body-bytes = 10000" in error["message"]


@STORED
async def test_of_items_only_known_fields_are_kept(client: Client) -> None:
    part = {"type": "input_text", "text": "Hi", "more": "x" * 1000}
    items = [
        {"role": "user", "content": [part], "more": [1] * 1000},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "more": 1},
        {"type": "function_call_output", "call_id": "1", "output": "2", "status": "completed"},
    ]
    reply = await post(client, "Hello", input=items)
    kept = (await client.get(f"{ROUTE}/{reply['id']}/input_items?order=asc")).json["data"]
    assert [[*each] for each in kept] == [
        ["type", "id", "role", "content"],
        ["type", "id", "call_id", "name", "arguments"],
        ["type", "id", "call_id", "output"],
    ]
    assert kept[0]["content"] == [{"type": "input_text", "text": "Hi"}]


@STORED
async def test_input_items_are_listed_by_pages(client: Client) -> None:
    items: list[Any] = [{"role": "user", "content": f"Number {number}"} for number in range(5)]
    items[3] |= {"type": "message", "id": None}
    reply = await post(client, "Hello", input=items)
    path = f"/{reply['id']}/input_items"
    seen: list[str] = []
    query, has_more = {"limit": "2", "order": "asc"}, True
    while has_more:
        page = (await client.send("GET", ROUTE + path, params=query)).json
        assert page["object"] == "list"
        ends = page["data"][0]["id"], page["data"][-1]["id"]
        assert (page["first_id"], page["last_id"]) == ends
        seen += [item["content"] for item in page["data"]]
        query["after"], has_more = page["last_id"], page["has_more"]
    assert seen == [item["content"] for item in items]
    whole = (await client.get(ROUTE + path)).json["data"]
    assert [item["content"] for item in whole] == seen[::-1]
    long = "000000001" + "0" * 5000  # more digits than an int may have
    for name, value in [*(("limit", each) for each in ("0", "x", long)), ("order", "up")]:
        status, error = await failure(client, "GET", path, params={name: value})
        assert (status, error["param"]) == (400, name)
    status, error = await failure(client, "GET", path, params={"after": "fish"})
    assert (status, error["param"]) == (400, "after")


@STORED
async def test_nothing_is_kept_against_the_clients_will(client: Client) -> None:
    reply = await post(client, "Hello", store=False)
    assert reply["store"] is False
    assert (await failure(client, "GET", f"/{reply['id']}"))[0] == 404


@pytest.mark.parametrize("settings", [{}, {**STORE, "response_store_bytes": 0}], ids=["no", "0"])
async def test_nothing_is_kept_without_a_store(client: Client) -> None:
    assert (await post(client, "Hello"))["store"] is False
    for fields in ({"store": True}, {"previous_response_id": "resp_x"}):
        error = await client.refused(400, ROUTE, **ASKED, **fields)
        assert (error["param"], error["code"]) == (*fields, "unsupported_parameter")
    for method, path in (("GET", "/resp_x"), ("DELETE", "/resp_x"), ("POST", "/resp_x/cancel")):
        status, error = await failure(client, method, path)
        assert (status, "response-store" in error["message"]) == (404, True)


@with_settings(**STORE, api_key=["mine", "yours"])
async def test_a_response_belongs_to_the_key_that_made_it(client: Client) -> None:
    reply = await post(client, "Hello", key="mine")
    yours: Any = {"headers": {"Authorization": "Bearer yours"}}
    path = f"/{reply['id']}"
    for method, end in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        assert (await failure(client, method, path + end, **yours))[0] == 404
    error = await client.refused(400, ROUTE, **ASKED, key="yours", previous_response_id=reply["id"])
    assert error["code"] == "previous_response_not_found"
    reference = {"type": "item_reference", "id": reply["output"][0]["id"]}
    await client.refused(400, ROUTE, key="yours", input=[reference])
    assert (await failure(client, "GET", path))[0] == 401
    assert (await client.get(ROUTE + path, Authorization="Bearer mine")).status == 200


@STORED
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_full_disk_fails_stored_responses_and_no_others(
    client: Client, is_stream: bool
) -> None:
    await fill(client.gateway)
    fields = ASKED | {"stream": is_stream, "instructions": "x" * 100_000}
    answer, _ = await asyncio.gather(client.post(ROUTE, **fields), client.tokenizer.answer("Hello"))
    if is_stream:
        reply = response_in(answer.text)
        assert (reply["status"], text_of(reply)) == ("failed", "Hello")
        error = reply["error"]
    else:
        assert (answer.status, answer.headers["X-Should-Retry"]) == (507, "false")
        error = answer.error
    assert error["code"] == "response_store_failed"
    assert "full" in error["message"]
    assert text_of(await post(client, "Hello", store=False)) == "Hello"


async def fill(gateway: GatewayService) -> None:
    """From here on the store's file cannot grow."""
    responses: Any
    [responses] = {
        getattr(route.handler, "__self__", None)
        for route in gateway._runner.app.router.routes()
        if route.resource is not None and route.resource.canonical.startswith(ROUTE)
    }
    database = responses._store._database._db
    [num_pages] = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {num_pages}")


@with_settings(**STORE, response_store_bytes=500)
async def test_one_that_is_too_large_for_the_store_is_named(client: Client) -> None:
    asked, request = await client.accepted(ROUTE, **ASKED)
    request.finish()
    answer = await asked
    assert (answer.status, answer.error["code"]) == (507, "response_store_failed")
    assert "response-store-bytes = 500" in answer.error["message"]


@STORED
async def test_a_stream_is_stored_as_it_ends(client: Client) -> None:
    asked, request = await client.accepted(ROUTE, **ASKED, stream=True)
    request.text("Hello", "!")
    request.finish("length")
    answer = await asked
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    reply = response_in(answer.text)
    assert (reply["status"], text_of(reply)) == ("incomplete", "Hello!")
    assert (await client.get(f"{ROUTE}/{reply['id']}")).json == reply


async def test_an_error_ends_a_stream_as_failed(client: Client) -> None:
    response, request = await client.streaming(ROUTE, **ASKED)
    request.fail(500, "worker_died", "a worker died")
    reply = response_in(await response.text())
    assert (reply["status"], reply["error"]["code"]) == ("failed", "worker_died")
    assert text_of(reply) == "x"


async def test_an_error_before_the_first_token_is_a_status(client: Client) -> None:
    asked, request = await client.begun(ROUTE, **ASKED, stream=True)
    request.fail(400, "context_length_exceeded", "prompt is too long", param="prompt")
    answer = await asked
    assert answer.status == 400
    assert (answer.error["param"], answer.error["message"]) == ("input", "input is too long")


async def created(response: aiohttp.ClientResponse) -> tuple[str, Any]:
    """The stream's first event, and its response."""
    lines = [(await response.content.readline()).decode() for _ in range(2)]
    return "".join(lines), json.loads(lines[1].removeprefix("data: "))["response"]


async def test_a_running_response_can_be_seen_and_cancelled(client: Client) -> None:
    """The canceller gets the partial response; so does the stream's reader."""
    response, _ = await client.streaming(ROUTE, **ASKED)
    begun, running = await created(response)
    path = f"{ROUTE}/{running['id']}"
    seen = (await client.get(path)).json
    assert (seen["status"], seen["output"]) == ("in_progress", [])
    reply = (await client.post(f"{path}/cancel")).json
    assert response_in(begun + await response.text()) == reply
    assert reply["status"] == "cancelled"
    await client.tokenizer.cancelled.get()
    await client.refused(404, f"{path}/cancel")


@with_settings(api_key=["mine"], max_open_requests_per_key=1)
async def test_limits_of_a_key_hold_and_its_tokens_are_counted(client: Client) -> None:
    before = await counted(client)
    asked, request = await client.accepted(ROUTE, **ASKED, key="mine")
    error = await client.refused(429, ROUTE, **ASKED, key="mine")
    assert error["code"] == "rate_limit_exceeded"
    request.text("Hel", "lo")
    await client.finish(asked, request)
    after = await counted(client)
    assert after["tokens"] - before["tokens"] == NUM_PROMPT_TOKENS + 2
    assert after["answered"] - before["answered"] == 1


async def counted(client: Client) -> dict[str, float]:
    """Tokens of all keys, and completed responses."""
    lines = (await client.get("/metrics", Authorization="Bearer mine")).text.splitlines()
    names = {
        "tokens": "shoal_key_tokens_total",
        "answered": f'shoal_http_requests_total{{route="{ROUTE}",status="200"}}',
    }
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning))
        for name, beginning in names.items()
    }


async def test_a_client_that_leaves_ends_its_response(client: Client) -> None:
    response, request = await client.streaming(ROUTE, **ASKED)
    response.close()
    cancel = await client.tokenizer.cancelled.get()
    assert [key.request for key in cancel.keys] == [request.submit.request]


@STORED
async def test_the_tokens_of_an_input_are_counted(client: Client) -> None:
    first = await post(client, "Hello")
    fields = {"input": "And?", "previous_response_id": first["id"], "instructions": "Be short."}
    answer = await client.post(f"{ROUTE}/input_tokens", **fields)
    [conversion] = client.tokenizer.converted
    assert conversion.kind == "chat"
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    num_bytes = len(json.dumps(messages, separators=(",", ":")))
    assert answer.json == {"input_tokens": num_bytes, "object": "response.input_tokens"}


def test_encrypted_reasoning_is_read_by_its_owner_and_with_its_key_alone() -> None:
    secret = "a secret of thirty-two characters"
    content = ReasoningCipher(secret).encrypt("Hmm", "me")
    assert "Hmm" not in content
    assert ReasoningCipher(secret).decrypt(content, "me") == "Hmm"
    assert ReasoningCipher(secret).decrypt(content, "you") is None
    assert ReasoningCipher(None).decrypt(content, "me") is None
    assert ReasoningCipher(secret + "x").decrypt(content, "me") is None
    for wrong in ("", "shoal1.", content[:-8], "gAAAA" + content, "ä"):
        assert ReasoningCipher(secret).decrypt(wrong, "me") is None
