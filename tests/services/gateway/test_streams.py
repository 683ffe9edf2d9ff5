"""Streams as bytes on the wire, and their ends after failures."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from openai import APIError, AsyncOpenAI

from services.gateway.chat.replies.writers import HEARTBEAT, WholeWriter
from services.gateway.metrics import SLOW_CLIENTS
from services.gateway.service import GatewayService
from shared.wire.messages import RequestKey, State
from tests.services.gateway.fakes import FakeTokenizer, Submitted, running_gateway, until

STREAM: Any = {"prompt": "a", "stream": True}


async def begin_stream(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> tuple[aiohttp.ClientResponse, Submitted]:
    """A stream with its first text under way."""
    posting = asyncio.create_task(http.post("/v1/completions", json=STREAM).__aenter__())
    request = await tokenizer.submitted.get()
    request.accept()
    request.text("x")
    return await posting, request


async def test_events_end_with_done_and_carry_the_headers_of_a_stream(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    response, request = await begin_stream(http, tokenizer)
    request.finish()
    body = await response.text()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Request-Id"] in request.submit.request
    *events, last, empty = body.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)


async def test_text_that_waits_for_a_slow_reader_becomes_one_chunk(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    posting = asyncio.create_task(http.post("/v1/completions", json=STREAM).__aenter__())
    request = await tokenizer.submitted.get()
    request.accept()
    request.text(*"abcdefgh")
    request.finish()
    body = await (await posting).text()
    chunks = [json.loads(event[6:]) for event in body.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcdefgh"
    assert len(chunks) <= 2


async def test_a_client_that_leaves_a_stream_cancels_its_request(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, gateway: GatewayService
) -> None:
    response, request = await begin_stream(http, tokenizer)
    response.close()
    cancel = await tokenizer.cancelled.get()
    assert cancel.keys == [RequestKey(*request.key)]
    await until(lambda: gateway.status().load == 0)


async def test_a_client_that_does_not_read_is_cut_off_and_its_request_cancelled(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    body = b'{"prompt": "a", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    before = SLOW_CLIENTS._value.get()
    async with running_gateway(tmp_path, slow_client_s=0.05) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(head + body)
            request = await tokenizer.accepted()
            while tokenizer.cancelled.empty():
                request.text("x" * 1_000_000)
                await asyncio.sleep(0.005)
            assert (await tokenizer.cancelled.get()).keys == [RequestKey(*request.key)]
        await until(lambda: gateway.status().load == 0)
    assert SLOW_CLIENTS._value.get() == before + 1


async def test_a_whole_reply_that_is_not_read_is_cut_off_too(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    body = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    before = SLOW_CLIENTS._value.get()
    async with running_gateway(tmp_path, slow_client_s=0.05) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        with socket.create_connection(("127.0.0.1", gateway.port)) as client:
            client.sendall(head + body)
            request = await tokenizer.accepted()
            for _ in range(20):
                request.text("x" * 1_000_000)
            request.finish()
            await until(lambda: SLOW_CLIENTS._value.get() == before + 1)
        await until(lambda: gateway.status().load == 0)


async def test_a_client_that_leaves_before_its_answer_cancels_its_request(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, gateway: GatewayService
) -> None:
    posting = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}).__aenter__())
    request = await tokenizer.submitted.get()
    request.accept()
    posting.cancel()
    cancel = await tokenizer.cancelled.get()
    assert cancel.keys == [RequestKey(*request.key)]
    await until(lambda: gateway.status().load == 0)


async def test_a_request_that_has_ended_is_not_cancelled(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    response, request = await begin_stream(http, tokenizer)
    request.finish()
    await response.text()
    second, _ = await begin_stream(http, tokenizer)
    second.close()
    assert (await tokenizer.cancelled.get()).keys[0].request != request.submit.request


async def test_a_failure_inside_a_stream_is_its_last_event(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    response, request = await begin_stream(http, tokenizer)
    request.fail(500, "poisoned", "twice died a worker")
    *_, error, done, _ = (await response.text()).split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"] == {
        "message": "twice died a worker",
        "type": "some_error",
        "param": None,
        "code": "poisoned",
    }
    assert done == "data: [DONE]"


async def test_openais_client_raises_the_error_that_ends_a_stream(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, request = await asyncio.gather(
        openai.completions.create(model="fish", prompt="a", stream=True),
        tokenizer.accepted(),
    )
    request.fail(500, "poisoned", "twice died a worker")
    with pytest.raises(APIError, match="twice died a worker"):
        async for _ in stream:
            pass


async def test_losing_the_tokenizer_for_good_ends_its_streams_with_unavailable(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, replay_s=0) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            response, _ = await begin_stream(http, tokenizer)
            await tokenizer.link.close("it swims away")
            *_, error, done, _ = (await response.text()).split("\n\n")
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
            assert done == "data: [DONE]"


async def test_messages_of_unknown_requests_are_ignored(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    response, request = await begin_stream(http, tokenizer)
    name = request.submit.request
    for stranger in (("unknown", 1), (name, 0), (name, 2)):
        submit = msgspec.structs.replace(request.submit, request=stranger[0], attempt=stranger[1])
        lost = Submitted(submit, request.prompt, request.peer)
        lost.accept()
        lost.text("wrong")
        lost.finish()
        lost.fail(500, "wrong", "wrong")
    request.finish()
    request.fail(500, "late", "after the end")
    body = await response.text()
    assert "wrong" not in body
    assert "late" not in body
    assert body.count('"finish_reason":"stop"') == 1


async def test_a_stream_that_waits_gets_comments_before_and_between_its_tokens(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, stream_heartbeat_s=0.05) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            posting = asyncio.create_task(http.post("/v1/completions", json=STREAM).__aenter__())
            request = await tokenizer.accepted()
            response = await posting
            assert await response.content.readuntil(b"\n\n") == HEARTBEAT
            request.text("x")
            events = [await response.content.readuntil(b"\n\n") for _ in range(4)]
            assert events[-1] == HEARTBEAT
            request.finish()
            *lines, done, _ = (await response.text()).split("\n\n")
            assert done == "data: [DONE]"
            texts = [event for event in events if event.startswith(b"data: ")]
            assert len(texts) == 1
            assert all(line.startswith(("data: ", ": waiting")) for line in lines)


async def test_openais_client_does_not_see_comments(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, stream_heartbeat_s=0.05) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        url = f"http://127.0.0.1:{gateway.port}/v1"
        async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
            stream, request = await asyncio.gather(
                openai.completions.create(model="fish", prompt="a", stream=True),
                tokenizer.accepted(),
            )
            await asyncio.sleep(0.2)
            request.text("carp")
            request.finish()
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "carp"


async def test_a_large_whole_reply_that_breaks_is_cut_off_and_holds_no_event(
    gateway: GatewayService, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = WholeWriter.write

    def breaking(self: WholeWriter) -> Iterator[bytes]:
        yield next(written(self))
        yield b" " * 100_000
        raise ZeroDivisionError

    monkeypatch.setattr(WholeWriter, "write", breaking)
    monkeypatch.setattr(WholeWriter, "is_large", True)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = b'{"prompt": "a"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    writer.write(head + body)
    await tokenizer.answer("x")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"data: " not in answer
    assert b"DONE" not in answer
    assert not answer.endswith(b"0\r\n\r\n"), "the last chunk must not come: the reply is not whole"
