"""Anthropic's messages through a gateway, whole and streamed; a test plays the tokenizer."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.service import GatewayService
from shared.wire.messages import OutputStart, State
from tests.services.gateway.apis.messages.asking import HELLO, text, user
from tests.services.gateway.apis.messages.events import PING, StreamFailed, read_message
from tests.services.gateway.asking import CALLER
from tests.services.gateway.fakes import (
    FakeTokenizer,
    running_gateway,
    until,
)
from tests.services.gateway.marked import accept, marking_tokenizer, say

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "fish", "max_tokens": 16, "messages": [HELLO]}
ADAPTIVE = {"type": "adaptive"}
ENDS = {"reason", "stop_reason", "num_cached"}


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    async with marking_tokenizer(tmp_path) as fake:
        yield fake


async def post(http: aiohttp.ClientSession, path: str = PATH, **fields: Any) -> Any:
    """The status, the headers and the body."""
    async with http.post(path, json=BODY | fields) as response:
        return response.status, response.headers, await response.text()


async def ask(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, pieces: list[str], **fields: Any
) -> Any:
    """The message made from a model's ``pieces``."""
    end = {
        name: fields.pop(name) for name in ("reason", "stop_reason", "num_cached") if name in fields
    }
    start = fields.pop("start", OutputStart.UNDECIDED)
    asking = asyncio.create_task(post(http, **fields))
    request = await tokenizer.submitted.get()
    accept(request, start)
    say(request, *pieces)
    request.finish(**end)
    status, headers, body = await asking
    assert status == 200, body
    assert headers["Request-Id"] == headers["X-Request-Id"]
    message = read_message(body) if fields.get("stream") else json.loads(body)
    assert message["id"] == f"msg_{headers['Request-Id']}"
    return message


STREAMED = pytest.mark.parametrize("stream", [False, True])


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
    http: aiohttp.ClientSession,
    tokenizer: FakeTokenizer,
    stream: bool,
    end: dict[str, Any],
    reason: str,
    sequence: str | None,
):
    message = await ask(http, tokenizer, ["Hi", " there"], stream=stream, **end)
    assert message["content"] == [{"type": "text", "text": "Hi there"}]
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@STREAMED
async def test_a_message_may_be_empty(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, stream: bool
):
    message = await ask(http, tokenizer, [], stream=stream, max_tokens=0, reason="length")
    assert message["content"] == []
    assert message["stop_reason"] == "max_tokens"


async def test_fields_without_effect_are_named_in_a_header(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
):
    edits = [{"type": "clear_tool_uses_20250919"}]
    asking = asyncio.create_task(post(http, context_management={"edits": edits}))
    await tokenizer.answer("Hi")
    _, headers, _ = await asking
    assert headers["X-Shoal-Warnings"] == "context_management: nothing is cleared"


async def test_a_stream_that_waits_gets_pings(tmp_path: Path, tokenizer: FakeTokenizer):
    async with running_gateway(tmp_path, stream_heartbeat_s=0.02) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            posting = asyncio.create_task(http.post(PATH, json=BODY | {"stream": True}))
            request = await tokenizer.accepted()
            response = await posting
            events = [await response.content.readuntil(b"\n\n") for _ in range(4)]
            ping = f"event: ping\ndata: {json.dumps(PING, separators=(',', ':'))}\n\n".encode()
            assert events[1:] == [ping] * 3
            request.text("Hi")
            request.finish()
            rest = await response.text()
            assert read_message(b"".join(events).decode() + rest)["stop_reason"] == "end_turn"


async def test_an_error_ends_a_stream_in_anthropics_words(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
):
    asking = asyncio.create_task(post(http, stream=True))
    request = await tokenizer.accepted()
    request.text("Hi")
    request.fail(503, "unavailable", "it swims away")
    _, headers, body = await asking
    with pytest.raises(StreamFailed) as failed:
        read_message(body)
    assert failed.value.args[0] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "it swims away"},
        "request_id": headers["Request-Id"],
    }


async def error_of(response: aiohttp.ClientResponse) -> tuple[int, str, str]:
    """Its status, type and message, after a check of its shape."""
    body = await response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == response.headers["Request-Id"]
    return response.status, body["error"]["type"], body["error"]["message"]


@pytest.mark.parametrize("path", [PATH, COUNT, f"{PATH}?beta=true"])
async def test_a_bad_request_is_refused_with_the_path_of_its_field(
    http: aiohttp.ClientSession, path: str
):
    turns = [HELLO, user(text("a"), {"type": "image", "source": {}})]
    async with http.post(path, json=BODY | {"messages": turns}) as response:
        status, kind, message = await error_of(response)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith('messages.1.content.1.type is "image"')


async def test_other_failures_have_the_same_shape(http: aiohttp.ClientSession):
    version = {"anthropic-version": "2023-06-01"}
    for method, path, data, headers, expected in (
        ("POST", PATH, b"{", {}, (400, "invalid_request_error")),
        ("POST", PATH, b"{}", {"Content-Type": "text/plain"}, (415, "invalid_request_error")),
        ("POST", PATH, BytesIO(b" " * (17 << 20)), {}, (413, "request_too_large")),
        ("GET", PATH, None, {}, (405, "invalid_request_error")),
        ("GET", f"{PATH}/fish", None, {}, (404, "not_found_error")),
        ("GET", "/v1/fish", None, version, (404, "not_found_error")),
        ("GET", "/v1/models/whale", None, version, (404, "not_found_error")),
        ("POST", PATH, json.dumps(BODY | {"model": "whale"}), {}, (404, "not_found_error")),
    ):
        async with http.request(method, path, data=data, headers=headers) as response:
            assert (await error_of(response))[:2] == expected, path


async def test_a_gateway_without_a_tokenizer_is_overloaded(tmp_path: Path):
    async with (
        running_gateway(tmp_path) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
        http.post(PATH, json=BODY) as response,
    ):
        assert (await error_of(response))[:2] == (529, "overloaded_error")
        assert int(response.headers["Retry-After"]) > 0


async def test_a_key_may_come_in_either_header_and_has_its_limits(
    tmp_path: Path, tokenizer: FakeTokenizer
):
    limits: Any = {"api_key": ["k1", "k2"], "max_open_requests_per_key": 1}
    async with running_gateway(tmp_path, **limits) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            for headers in ({}, {"x-api-key": "k3"}, {"Authorization": "Bearer k3"}):
                async with http.post(PATH, json=BODY, headers=headers) as response:
                    assert (await error_of(response))[:2] == (401, "authentication_error")
            both = {"x-api-key": "k1", "Authorization": "Bearer k3"}
            for headers in (both, {"x-api-key": "k2"}, {"Authorization": "Bearer k2"}):
                asking = asyncio.create_task(http.post(PATH, json=BODY, headers=headers))
                request = await tokenizer.accepted()
                async with http.post(PATH, json=BODY, headers=headers) as response:
                    assert (await error_of(response))[:2] == (429, "rate_limit_error")
                request.finish()
                async with await asking as response:
                    assert response.status == 200


async def test_a_client_that_leaves_ends_its_request(
    gateway: GatewayService, http: aiohttp.ClientSession, tokenizer: FakeTokenizer
):
    response, request = await asyncio.gather(
        http.post(PATH, json=BODY | {"stream": True}), tokenizer.accepted()
    )
    response.close()
    (key,) = (await tokenizer.cancelled.get()).keys
    assert (key.request, key.attempt) == request.key


async def test_tokens_are_counted_of_the_same_prompt(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
):
    await check_count(http, tokenizer, system="Be kind.", thinking=ADAPTIVE)


async def check_count(http: aiohttp.ClientSession, tokenizer: FakeTokenizer, **more: Any) -> None:
    asking = asyncio.create_task(post(http, **more))
    request = await tokenizer.answer("Hi")
    await asking
    status, _, body = await post(http, COUNT, **more)
    assert status == 200
    (convert,) = tokenizer.converted
    assert convert.kind == request.submit.kind == "chat"
    assert convert.chat == request.submit.chat
    assert convert.adds_special_tokens == request.submit.text.adds_special_tokens
    assert json.loads(body) == {"input_tokens": request.prompt.nbytes}


async def test_models_are_listed_as_each_client_knows_them(http: aiohttp.ClientSession):
    version = {"anthropic-version": "2023-06-01"}
    async with http.get("/v1/models", headers=version) as response:
        models = await response.json()
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
    async with http.get("/v1/models/org/fish", headers=version) as response:
        assert (await response.json())["type"] == "model"
    async with http.get("/v1/models") as response:
        assert (await response.json())["object"] == "list"
