"""/v1/responses over HTTP: storage by owner, errors, ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.apis.responses.requests.reasoning_cipher import ReasoningCipher
from services.gateway.service import GatewayService
from shared.wire.messages import State
from tests.services.gateway.apis.responses.event_order import check_events, parsed_events
from tests.services.gateway.fakes import (
    NUM_PROMPT_TOKENS,
    FakeTokenizer,
    running_gateway,
    until,
)

ROUTE = "/v1/responses"
ASKED: dict[str, Any] = {"input": "Hi"}


@asynccontextmanager
async def gateway_with(tmp_path: Path, **settings: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with running_gateway(tmp_path, **settings) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        url = f"http://127.0.0.1:{gateway.port}"
        async with aiohttp.ClientSession(url) as session:
            yield session


@pytest.fixture
async def stored(tmp_path: Path, tokenizer: FakeTokenizer) -> AsyncIterator[aiohttp.ClientSession]:
    """A gateway with a store."""
    async with gateway_with(tmp_path, response_store=tmp_path / "store.db") as session:
        yield session


async def post(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, *texts: str, **fields: Any
) -> Any:
    """A reply of ``texts``."""
    answering = asyncio.create_task(tokenizer.answer(*texts))
    async with http.post(ROUTE, json=ASKED | fields) as response:
        assert response.status == 200, await response.text()
        reply = await response.json()
    submitted = await answering
    reply["messages"] = json.loads(submitted.prompt.tobytes())
    return reply


async def error_of(http: aiohttp.ClientSession, method: str, path: str, **more: Any) -> Any:
    async with http.request(method, path, **more) as response:
        return response.status, (await response.json())["error"]


def text_of(reply: Any) -> str:
    text: str = reply["output"][-1]["content"][0]["text"]
    return text


async def test_a_conversation_goes_on_from_the_stored_response(
    stored: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    first = await post(stored, tokenizer, "Hello", "!", instructions="Be short.")
    assert first["store"] is True
    second = await post(stored, tokenizer, "Yes.", previous_response_id=first["id"], input="Well?")
    third = await post(stored, tokenizer, "No.", previous_response_id=second["id"], input="Sure?")
    assert third["messages"] == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Sure?"},
    ]
    async with stored.get(f"{ROUTE}/{second['id']}") as response:
        del second["messages"]
        assert await response.json() == second
    async with stored.delete(f"{ROUTE}/{second['id']}") as response:
        assert await response.json() == {"id": second["id"], "object": "response", "deleted": True}
    status, error = await error_of(stored, "GET", f"{ROUTE}/{second['id']}")
    assert (status, error["code"]) == (404, "not_found")
    fields = ASKED | {"previous_response_id": third["id"]}
    status, error = await error_of(stored, "POST", ROUTE, json=fields)
    assert (status, error["code"]) == (400, "previous_response_not_found")
    assert second["id"] in error["message"]


async def test_items_can_be_referred_to(
    stored: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    first = await post(stored, tokenizer, "Hello")
    reference = {"type": "item_reference", "id": first["output"][0]["id"]}
    more = {"role": "user", "content": "And?"}
    second = await post(stored, tokenizer, "Well.", input=[reference, more])
    assert second["messages"] == [{"role": "assistant", "content": "Hello"}, more]
    fields = {"input": [more, {"type": "item_reference", "id": "msg_fish"}]}
    status, error = await error_of(stored, "POST", ROUTE, json=fields)
    assert (status, error["param"]) == (400, "input[1].id")


async def test_the_responses_of_references_have_a_limit_of_bytes(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    settings = {"response_store": tmp_path / "store.db", "max_body_bytes": 10_000}
    async with gateway_with(tmp_path, **settings) as http:
        replies = [await post(http, tokenizer, "x" * 6000) for _ in range(2)]
        items = [{"type": "item_reference", "id": each["output"][0]["id"]} for each in replies]
        await post(http, tokenizer, "Well.", input=items[:1])
        status, error = await error_of(http, "POST", ROUTE, json={"input": items})
        assert (status, error["param"]) == (400, "input")
        assert "max-body-bytes = 10000" in error["message"]


async def test_of_items_only_known_fields_are_kept(
    stored: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    part = {"type": "input_text", "text": "Hi", "more": "x" * 1000}
    items = [
        {"role": "user", "content": [part], "more": [1] * 1000},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "more": 1},
        {"type": "function_call_output", "call_id": "1", "output": "2", "status": "completed"},
    ]
    reply = await post(stored, tokenizer, "Hello", input=items)
    async with stored.get(f"{ROUTE}/{reply['id']}/input_items?order=asc") as response:
        kept = (await response.json())["data"]
    assert [[*each] for each in kept] == [
        ["type", "id", "role", "content"],
        ["type", "id", "call_id", "name", "arguments"],
        ["type", "id", "call_id", "output"],
    ]
    assert kept[0]["content"] == [{"type": "input_text", "text": "Hi"}]


async def test_input_items_are_listed_by_pages(
    stored: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": f"Number {number}"} for number in range(5)
    ]
    items[3] |= {"type": "message", "id": None}
    reply = await post(stored, tokenizer, "Hello", input=items)
    path = f"{ROUTE}/{reply['id']}/input_items"
    seen: list[str] = []
    query = {"limit": "2", "order": "asc"}
    has_more = True
    while has_more:
        async with stored.get(path, params=query) as response:
            page = await response.json()
        assert page["object"] == "list"
        assert (page["first_id"], page["last_id"]) == (
            page["data"][0]["id"],
            page["data"][-1]["id"],
        )
        seen += [item["content"] for item in page["data"]]
        query["after"], has_more = page["last_id"], page["has_more"]
    assert seen == [item["content"] for item in items]
    async with stored.get(path) as response:
        assert [item["content"] for item in (await response.json())["data"]] == seen[::-1]
    long = "000000001" + "0" * 5000  # more digits than an int may have
    for query in (
        {"limit": "0"},
        {"limit": "x"},
        {"limit": long},
        {"order": "up"},
        {"after": "fish"},
    ):
        status, error = await error_of(stored, "GET", path, params=query)
        assert (status, error["param"]) == (400, *query)


async def test_nothing_is_kept_without_a_store_or_against_the_clients_will(
    stored: aiohttp.ClientSession, tokenizer: FakeTokenizer, tmp_path: Path
) -> None:
    reply = await post(stored, tokenizer, "Hello", store=False)
    assert reply["store"] is False
    status, _ = await error_of(stored, "GET", f"{ROUTE}/{reply['id']}")
    assert status == 404
    async with gateway_with(tmp_path) as without:
        assert (await post(without, tokenizer, "Hello"))["store"] is False
        for fields in ({"store": True}, {"previous_response_id": "resp_x"}):
            status, error = await error_of(without, "POST", ROUTE, json=ASKED | fields)
            assert (status, error["param"], error["code"]) == (
                400,
                *fields,
                "unsupported_parameter",
            )
        for method, path in (("GET", "/resp_x"), ("DELETE", "/resp_x"), ("POST", "/resp_x/cancel")):
            status, error = await error_of(without, method, ROUTE + path)
            assert (status, "response-store" in error["message"]) == (404, True)


async def test_a_response_belongs_to_the_key_that_made_it(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    settings: Any = {"response_store": tmp_path / "store.db", "api_key": ["mine", "yours"]}
    async with gateway_with(tmp_path, **settings) as http:
        mine: dict[str, Any] = {"headers": {"Authorization": "Bearer mine"}}
        yours: dict[str, Any] = {"headers": {"Authorization": "Bearer yours"}}
        answering = asyncio.create_task(tokenizer.answer("Hello"))
        async with http.post(ROUTE, json=ASKED, **mine) as response:
            reply = await response.json()
        await answering
        path = f"{ROUTE}/{reply['id']}"
        for method, end in (
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/input_items"),
            ("POST", "/cancel"),
        ):
            status, _ = await error_of(http, method, path + end, **yours)
            assert status == 404
        fields = ASKED | {"previous_response_id": reply["id"]}
        status, error = await error_of(http, "POST", ROUTE, json=fields, **yours)
        assert (status, error["code"]) == (400, "previous_response_not_found")
        reference = {"input": [{"type": "item_reference", "id": reply["output"][0]["id"]}]}
        status, _ = await error_of(http, "POST", ROUTE, json=reference, **yours)
        assert status == 400
        status, _ = await error_of(http, "GET", path)
        assert status == 401
        async with http.get(path, **mine) as response:
            assert response.status == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_full_disk_fails_stored_responses_and_no_others(
    tmp_path: Path, tokenizer: FakeTokenizer, is_stream: bool
) -> None:
    settings = {"response_store": tmp_path / "store.db"}
    async with running_gateway(tmp_path, **settings) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        await fill(gateway)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            answering = asyncio.create_task(tokenizer.answer("Hello"))
            fields = ASKED | {"stream": is_stream, "instructions": "x" * 100_000}
            async with http.post(ROUTE, json=fields) as response:
                text = await response.text()
            await answering
            if is_stream:
                reply = check_events(parsed_events(text))
                assert (reply["status"], text_of(reply)) == ("failed", "Hello")
                error = reply["error"]
            else:
                assert response.status == 507
                assert response.headers["X-Should-Retry"] == "false"
                error = json.loads(text)["error"]
            assert error["code"] == "response_store_failed"
            assert "full" in error["message"]
            assert text_of(await post(http, tokenizer, "Hello", store=False)) == "Hello"


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


async def test_one_that_is_too_large_for_the_store_is_named(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    settings: Any = {"response_store": tmp_path / "store.db", "response_store_bytes": 500}
    async with gateway_with(tmp_path, **settings) as http:
        answering = asyncio.create_task(tokenizer.answer("Hello"))
        status, error = await error_of(http, "POST", ROUTE, json=ASKED)
        await answering
        assert (status, error["code"]) == (507, "response_store_failed")
        assert "response-store-bytes = 500" in error["message"]


async def test_a_stream_is_stored_as_it_ends(
    stored: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    answering = asyncio.create_task(tokenizer.answer("Hello", "!", reason="length"))
    async with stored.post(ROUTE, json=ASKED | {"stream": True}) as response:
        assert response.content_type == "text/event-stream"
        reply = check_events(parsed_events(await response.text()))
    await answering
    assert (reply["status"], text_of(reply)) == ("incomplete", "Hello!")
    async with stored.get(f"{ROUTE}/{reply['id']}") as response:
        assert await response.json() == reply


async def test_an_error_ends_a_stream_as_failed(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    posting = asyncio.create_task(http.post(ROUTE, json=ASKED | {"stream": True}))
    request = await tokenizer.accepted()
    request.text("Hel")
    response = await posting
    request.fail(500, "worker_died", "a worker died")
    reply = check_events(parsed_events(await response.text()))
    assert (reply["status"], reply["error"]["code"]) == ("failed", "worker_died")
    assert text_of(reply) == "Hel"


async def test_an_error_before_the_first_token_is_a_status(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    posting = asyncio.create_task(http.post(ROUTE, json=ASKED | {"stream": True}))
    request = await tokenizer.submitted.get()
    request.fail(400, "context_length_exceeded", "prompt is too long", param="prompt")
    response = await posting
    assert response.status == 400
    error = (await response.json())["error"]
    assert (error["param"], error["message"]) == ("input", "input is too long")


async def test_a_running_response_can_be_seen_and_cancelled(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    """The canceller gets the partial response; so does the stream's reader."""
    posting = asyncio.create_task(http.post(ROUTE, json=ASKED | {"stream": True}))
    request = await tokenizer.accepted()
    request.text("Hel")
    response = await posting
    lines = [(await response.content.readline()).decode() for _ in range(2)]
    created = json.loads(lines[1].removeprefix("data: "))["response"]
    path = f"{ROUTE}/{created['id']}"
    async with http.get(path) as running:
        seen = await running.json()
    assert (seen["status"], seen["output"]) == ("in_progress", [])
    async with http.post(f"{path}/cancel") as cancelled:
        reply = await cancelled.json()
    rest = (await response.read()).decode()
    assert check_events(parsed_events("".join(lines) + rest)) == reply
    assert reply["status"] == "cancelled"
    await tokenizer.cancelled.get()
    status, _ = await error_of(http, "POST", f"{path}/cancel")
    assert status == 404


async def test_limits_of_a_key_hold_and_its_tokens_are_counted(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    settings: Any = {"api_key": ["mine"], "max_open_requests_per_key": 1}
    async with gateway_with(tmp_path, **settings) as http:
        mine: dict[str, Any] = {"headers": {"Authorization": "Bearer mine"}}
        before = await counted(http, mine)
        posting = asyncio.create_task(http.post(ROUTE, json=ASKED, **mine))
        request = await tokenizer.accepted()
        status, error = await error_of(http, "POST", ROUTE, json=ASKED, **mine)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
        request.text("Hel", "lo")
        request.finish()
        assert (await posting).status == 200
        after = await counted(http, mine)
        assert after["tokens"] - before["tokens"] == NUM_PROMPT_TOKENS + 2
        assert after["answered"] - before["answered"] == 1


async def counted(http: aiohttp.ClientSession, key: dict[str, Any]) -> dict[str, float]:
    """Tokens of all keys, and completed responses."""
    async with http.get("/metrics", **key) as response:
        lines = (await response.text()).splitlines()
    names = {
        "tokens": "shoal_key_tokens_total",
        "answered": f'shoal_http_requests_total{{route="{ROUTE}",status="200"}}',
    }
    return {
        name: sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(beginning))
        for name, beginning in names.items()
    }


async def test_a_client_that_leaves_ends_its_response(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    response = asyncio.create_task(http.post(ROUTE, json=ASKED | {"stream": True}))
    request = await tokenizer.accepted()
    request.text("Hel")
    (await response).close()
    cancel = await tokenizer.cancelled.get()
    assert [key.request for key in cancel.keys] == [request.submit.request]


async def test_the_tokens_of_an_input_are_counted(
    stored: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    first = await post(stored, tokenizer, "Hello")
    fields = {"input": "And?", "previous_response_id": first["id"], "instructions": "Be short."}
    async with stored.post(f"{ROUTE}/input_tokens", json=fields) as response:
        counted = await response.json()
    [conversion] = tokenizer.converted
    assert conversion.kind == "chat"
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    num_bytes = len(json.dumps(messages, separators=(",", ":")))
    assert counted == {"input_tokens": num_bytes, "object": "response.input_tokens"}


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
