"""Streams as bytes on the wire, and their ends after failures."""

import asyncio
import json
import socket
from collections.abc import Iterator

import msgspec
import pytest
from openai import APIError, AsyncOpenAI

from services.gateway.chat.replies.writers import HEARTBEAT, WholeWriter
from services.gateway.metrics import SLOW_CLIENTS
from services.gateway.service import GatewayService
from shared.wire.messages import RequestKey
from tests.services.gateway.client import Client, raw_post, with_settings
from tests.services.gateway.fakes import FakeTokenizer, Submitted, until


def last_error(stream: str) -> dict[str, str | None]:
    *_, error, done, _ = stream.split("\n\n")
    assert done == "data: [DONE]"
    found: dict[str, str | None] = json.loads(error.removeprefix("data: "))["error"]
    return found


async def test_events_end_with_done_and_carry_the_headers_of_a_stream(client: Client) -> None:
    response, request = await client.streaming()
    request.finish()
    body = await response.text()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Request-Id"] in request.submit.request
    *events, last, empty = body.split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)


async def test_text_that_waits_for_a_slow_reader_becomes_one_chunk(client: Client) -> None:
    asked, request = await client.accepted(prompt="a", stream=True)
    request.text(*"abcdefgh")
    chunks = (await client.finish(asked, request)).events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "abcdefgh"
    assert len(chunks) <= 2


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(client: Client, is_stream: bool) -> None:
    if is_stream:
        response, request = await client.streaming()
        response.close()
    else:
        asked, request = await client.accepted()
        asked.cancel()
    cancel = await client.tokenizer.cancelled.get()
    assert cancel.keys == [RequestKey(*request.key)]
    await until(lambda: client.gateway.status().load == 0)


@with_settings(slow_client_s=0.05)
@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_does_not_read_is_cut_off(
    gateway: GatewayService, tokenizer: FakeTokenizer, is_stream: bool
) -> None:
    """The request of a stream is cancelled too."""
    before = SLOW_CLIENTS._value.get()
    with socket.create_connection(("127.0.0.1", gateway.port)) as client:
        client.sendall(raw_post(prompt="a", stream=is_stream))
        request = await tokenizer.accepted()
        if is_stream:
            while tokenizer.cancelled.empty():
                request.text("x" * 1_000_000)
                await asyncio.sleep(0.005)
            assert (await tokenizer.cancelled.get()).keys == [RequestKey(*request.key)]
        else:
            for _ in range(20):
                request.text("x" * 1_000_000)
            request.finish()
            await until(lambda: SLOW_CLIENTS._value.get() == before + 1)
    await until(lambda: gateway.status().load == 0)
    assert SLOW_CLIENTS._value.get() == before + 1


async def test_a_request_that_has_ended_is_not_cancelled(client: Client) -> None:
    response, request = await client.streaming()
    request.finish()
    await response.text()
    second, _ = await client.streaming()
    second.close()
    cancel = await client.tokenizer.cancelled.get()
    assert cancel.keys[0].request != request.submit.request


async def test_a_failure_inside_a_stream_is_its_last_event(client: Client) -> None:
    response, request = await client.streaming()
    request.fail(500, "poisoned", "twice died a worker")
    assert last_error(await response.text()) == {
        "message": "twice died a worker", "type": "some_error", "param": None, "code": "poisoned",
    }  # fmt: skip


async def test_openais_client_raises_the_error_that_ends_a_stream(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, request = await asyncio.gather(
        openai.completions.create(model="fish", prompt="a", stream=True), tokenizer.accepted()
    )
    request.fail(500, "poisoned", "twice died a worker")
    with pytest.raises(APIError, match="twice died a worker"):
        async for _ in stream:
            pass


@with_settings(replay_s=0)
async def test_losing_the_tokenizer_for_good_ends_its_streams_with_unavailable(
    client: Client,
) -> None:
    response, _ = await client.streaming()
    await client.tokenizer.link.close("it swims away")
    assert last_error(await response.text())["code"] == "unavailable"


async def test_messages_of_unknown_requests_are_ignored(client: Client) -> None:
    response, request = await client.streaming()
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


@with_settings(stream_heartbeat_s=0.05)
async def test_a_stream_that_waits_gets_comments_before_and_between_its_tokens(
    client: Client,
) -> None:
    body = {"prompt": "a", "stream": True}
    posting = asyncio.create_task(client.http.post("/v1/completions", json=body).__aenter__())
    request = await client.tokenizer.accepted()
    response = await posting
    assert await response.content.readuntil(b"\n\n") == HEARTBEAT
    request.text("x")
    events = [await response.content.readuntil(b"\n\n") for _ in range(4)]
    assert events[-1] == HEARTBEAT
    request.finish()
    *lines, done, _ = (await response.text()).split("\n\n")
    assert done == "data: [DONE]"
    assert len([event for event in events if event.startswith(b"data: ")]) == 1
    assert all(line.startswith(("data: ", ": waiting")) for line in lines)


@with_settings(stream_heartbeat_s=0.05)
async def test_openais_client_does_not_see_comments(
    openai: AsyncOpenAI, tokenizer: FakeTokenizer
) -> None:
    stream, request = await asyncio.gather(
        openai.completions.create(model="fish", prompt="a", stream=True), tokenizer.accepted()
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
    writer.write(raw_post(prompt="a"))
    await tokenizer.answer("x")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"data: " not in answer
    assert b"DONE" not in answer
    assert not answer.endswith(b"0\r\n\r\n"), "the last chunk must not come: the reply is not whole"
