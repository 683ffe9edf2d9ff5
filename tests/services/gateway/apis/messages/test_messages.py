"""Anthropic's messages through a gateway, whole and streamed; a test plays the tokenizer."""

import asyncio
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from shared.wire.messages import ModelInfo, OutputStart
from tests.services.gateway.apis.messages.asking import HELLO, text, user
from tests.services.gateway.apis.messages.events import PING, StreamFailed, read_message
from tests.services.gateway.asking import CALLER
from tests.services.gateway.client import Answer, Client, client_of, with_settings
from tests.services.gateway.fakes import running_gateway
from tests.services.gateway.marked import accept, say

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "fish", "max_tokens": 16, "messages": [HELLO]}
ADAPTIVE = {"type": "adaptive"}
VERSION = {"anthropic-version": "2023-06-01"}
STREAMED = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture
def model() -> ModelInfo:
    return CALLER


async def ask(client: Client, pieces: list[str], **fields: Any) -> Any:
    """The message made from a model's ``pieces``."""
    ends = ("reason", "stop_reason", "num_cached")
    end = {name: fields.pop(name) for name in ends if name in fields}
    start = fields.pop("start", OutputStart.UNDECIDED)
    asked, request = await client.begun(PATH, **BODY | fields)
    accept(request, start)
    say(request, *pieces)
    request.finish(**end)
    answer = await asked
    assert answer.status == 200, answer.text
    assert answer.headers["Request-Id"] == answer.headers["X-Request-Id"]
    message = read_message(answer.text) if fields.get("stream") else answer.json
    assert message["id"] == f"msg_{answer.headers['Request-Id']}"
    return message


def error_of(answer: Answer) -> tuple[int, str, str]:
    """Its status, type and message, after a check of its shape."""
    body = answer.json
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == answer.headers["Request-Id"]
    return answer.status, body["error"]["type"], body["error"]["message"]


@STREAMED
@pytest.mark.parametrize(
    ("end", "reason", "sequence"),
    [
        ({"reason": "stop"}, "end_turn", None),
        ({"reason": "stop", "stop_reason": 7}, "end_turn", None),
        ({"reason": "stop", "stop_reason": "END"}, "stop_sequence", "END"),
        ({"reason": "length", "max_tokens": 2}, "max_tokens", None),
        ({"reason": "length", "max_tokens": 3}, "model_context_window_exceeded", None),
        ({"reason": "abort"}, "end_turn", None),
    ],
)
async def test_why_a_message_ends(
    client: Client, stream: bool, end: dict[str, Any], reason: str, sequence: str | None
):
    message = await ask(client, ["Hi", " there"], stream=stream, **end)
    assert message["content"] == [{"type": "text", "text": "Hi there"}]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@STREAMED
async def test_a_message_may_be_empty(client: Client, stream: bool):
    message = await ask(client, [], stream=stream, max_tokens=0, reason="length")
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")


async def test_fields_without_effect_are_named_in_a_header(client: Client):
    edits = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    answer, _ = await client.answered(PATH, "Hi", **BODY, context_management=edits)
    assert answer.headers["X-Shoal-Warnings"] == "context_management: nothing is cleared"


@with_settings(stream_heartbeat_s=0.02)
async def test_a_stream_that_waits_gets_pings(client: Client):
    posting = asyncio.create_task(client.http.post(PATH, json=BODY | {"stream": True}))
    request = await client.tokenizer.accepted()
    response = await posting
    events = [await response.content.readuntil(b"\n\n") for _ in range(4)]
    ping = f"event: ping\ndata: {json.dumps(PING, separators=(',', ':'))}\n\n".encode()
    assert events[1:] == [ping] * 3
    request.text("Hi")
    request.finish()
    whole = b"".join(events).decode() + await response.text()
    assert read_message(whole)["stop_reason"] == "end_turn"


async def test_an_error_ends_a_stream_in_anthropics_words(client: Client):
    asked, request = await client.accepted(PATH, **BODY, stream=True)
    request.text("Hi")
    request.fail(503, "unavailable", "it swims away")
    answer = await asked
    with pytest.raises(StreamFailed) as failed:
        read_message(answer.text)
    assert failed.value.args[0] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "it swims away"},
        "request_id": answer.headers["Request-Id"],
    }


@pytest.mark.parametrize("path", [PATH, COUNT, f"{PATH}?beta=true"])
async def test_a_bad_request_is_refused_with_the_path_of_its_field(client: Client, path: str):
    turns = [HELLO, user(text("a"), {"type": "image", "source": {}})]
    status, kind, message = error_of(await client.post(path, **BODY | {"messages": turns}))
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith('messages.1.content.1.type is "image"')


@pytest.mark.parametrize(
    ("method", "path", "data", "headers", "expected"),
    [
        ("POST", PATH, b"{", {}, (400, "invalid_request_error")),
        ("POST", PATH, b"{}", {"Content-Type": "text/plain"}, (415, "invalid_request_error")),
        ("POST", PATH, BytesIO(b" " * (17 << 20)), {}, (413, "request_too_large")),
        ("GET", PATH, None, {}, (405, "invalid_request_error")),
        ("GET", f"{PATH}/fish", None, {}, (404, "not_found_error")),
        ("GET", "/v1/fish", None, VERSION, (404, "not_found_error")),
        ("GET", "/v1/models/whale", None, VERSION, (404, "not_found_error")),
        ("POST", PATH, json.dumps(BODY | {"model": "whale"}), {}, (404, "not_found_error")),
    ],
    ids=["JSON", "type", "size", "method", "path", "any path", "models", "model"],
)
async def test_other_failures_have_the_same_shape(
    client: Client, method: str, path: str, data: Any, headers: Any, expected: tuple[int, str]
):
    answer = await client.send(method, path, data=data, headers=headers)
    assert error_of(answer)[:2] == expected


async def test_a_gateway_without_a_tokenizer_is_overloaded(tmp_path: Path):
    async with running_gateway(tmp_path) as gateway, client_of(gateway) as client:
        answer = await client.post(PATH, **BODY)
        assert error_of(answer)[:2] == (529, "overloaded_error")
        assert int(answer.headers["Retry-After"]) > 0


@with_settings(api_key=["k1", "k2"], max_open_requests_per_key=1)
async def test_a_key_may_come_in_either_header_and_has_its_limits(client: Client):
    async def post(headers: dict[str, str]) -> Answer:
        return await client.send("POST", PATH, json=BODY, headers=headers)

    for headers in ({}, {"x-api-key": "k3"}, {"Authorization": "Bearer k3"}):
        assert error_of(await post(headers))[:2] == (401, "authentication_error")
    both = {"x-api-key": "k1", "Authorization": "Bearer k3"}
    for headers in (both, {"x-api-key": "k2"}, {"Authorization": "Bearer k2"}):
        asked = asyncio.create_task(post(headers))
        request = await client.tokenizer.accepted()
        assert error_of(await post(headers))[:2] == (429, "rate_limit_error")
        await client.finish(asked, request)


async def test_a_client_that_leaves_ends_its_request(client: Client):
    response, request = await client.streaming(PATH, first="", **BODY)
    response.close()
    (key,) = (await client.tokenizer.cancelled.get()).keys
    assert (key.request, key.attempt) == request.key


async def test_tokens_are_counted_of_the_same_prompt(client: Client):
    await check_count(client, system="Be kind.", thinking=ADAPTIVE)


async def check_count(client: Client, **more: Any) -> None:
    _, request = await client.answered(PATH, "Hi", **BODY, **more)
    answer = await client.post(COUNT, **BODY, **more)
    (convert,) = client.tokenizer.converted
    assert convert.kind == request.submit.kind == "chat"
    assert convert.chat == request.submit.chat
    assert convert.adds_special_tokens == request.submit.text.adds_special_tokens
    assert (answer.status, answer.json) == (200, {"input_tokens": request.prompt.nbytes})


async def test_models_are_listed_as_each_client_knows_them(client: Client):
    models = (await client.get("/v1/models", **VERSION)).json
    assert models["data"][0] == {
        "type": "model",
        "id": "fish",
        "display_name": "fish",
        "created_at": "1970-01-01T00:00:01Z",
        "max_input_tokens": CALLER.max_model_len,
        "max_tokens": CALLER.max_model_len,
    }
    assert (models["first_id"], models["last_id"]) == ("fish", "org/fish")
    assert models["has_more"] is False
    assert (await client.get("/v1/models/org/fish", **VERSION)).json["type"] == "model"
    assert (await client.get("/v1/models")).json["object"] == "list"
