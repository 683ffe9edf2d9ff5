"""Images from a client's request to the tokenizer, and again after a loss."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.metrics import BUFFERED_BYTES
from shared.errors import RETRY_AFTER_S
from shared.wire.messages import MEDIA_MINOR, Lost, RequestKey, State
from tests.services.gateway.fakes import (
    FakeTokenizer,
    Submitted,
    fake_tokenizer,
    running_gateway,
    until,
)
from tests.services.gateway.media.asking import FILE, SEER, data_url, image, user

CHAT = "/v1/chat/completions"
BODY = {"messages": [user(image(FILE), image(b"other"))], "mm_processor_kwargs": {"max_pixels": 9}}


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(tmp_path, model=SEER) as fake:
        yield fake


def files_of(request: Submitted) -> list[bytes]:
    assert len(request.submit.media) == len(request.files)
    return [each.tobytes() for each in request.files]


async def asked(http: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def test_files_reach_the_tokenizer_and_a_replay_has_them_again(
    tokenizer: FakeTokenizer, http: aiohttp.ClientSession
) -> None:
    asking = asyncio.create_task(asked(http, CHAT, BODY))
    request = await tokenizer.submitted.get()
    assert files_of(request) == [FILE, b"other"]
    assert request.submit.media_options == '{"max_pixels": 9}'
    assert [each.param for each in request.submit.media] == [
        f"messages[0].content[{n}].image_url.url" for n in range(2)
    ]
    num_bytes = len(FILE) + len(b"other")
    assert BUFFERED_BYTES._value.get() >= num_bytes
    request.accept()
    request.text("a")
    request.peer.send(Lost([RequestKey(*request.key)], is_explained=True))
    again = await tokenizer.submitted.get()
    assert (again.submit.kind, files_of(again)) == ("ids", [FILE, b"other"])
    assert BUFFERED_BYTES._value.get() >= num_bytes
    again.accept()
    again.num_sent[0] = 1
    again.text("b")
    again.finish()
    status, reply = await asking
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "ab")
    assert BUFFERED_BYTES._value.get() == 0


async def test_files_of_dropped_turns_are_not_kept(
    tokenizer: FakeTokenizer, http: aiohttp.ClientSession
) -> None:
    dropped = bytes(512 << 10)
    body = {"messages": [user(image(dropped)), user(image(FILE))], "stream": True}
    asking = asyncio.ensure_future(http.post(CHAT, json=body))
    request = await tokenizer.submitted.get()
    assert BUFFERED_BYTES._value.get() >= len(dropped)
    request.accept(media=[1])
    request.text("a")
    async with await asking as response:
        await response.content.readline()
        assert len(FILE) <= BUFFERED_BYTES._value.get() < len(dropped)
        request.finish()
        await response.read()
    assert BUFFERED_BYTES._value.get() == 0


async def test_a_tokenizer_that_knows_no_images_gets_none(tmp_path: Path) -> None:
    async with (
        fake_tokenizer(tmp_path, "old", SEER, minor=MEDIA_MINOR - 1) as old,
        running_gateway(tmp_path) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        await until(lambda: gateway.status().state == State.READY)
        async with http.post(CHAT, json=BODY) as response:
            reply = await response.json()
            assert response.status == 503
            assert float(response.headers["Retry-After"]) == RETRY_AFTER_S
        assert f"a tokenizer of protocol minor {MEDIA_MINOR}" in reply["error"]["message"]
        async with fake_tokenizer(tmp_path, "new", SEER) as new:
            await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 2)
            for _ in range(2):
                asking = asyncio.create_task(asked(http, CHAT, BODY))
                await new.answer("a")
                assert (await asking)[0] == 200
        assert old.submitted.empty()
        assert not old.converted


async def test_a_large_image_is_read_beside_other_requests(
    tokenizer: FakeTokenizer, http: aiohttp.ClientSession
) -> None:
    file = bytes(range(256)) * (2 << 10)
    url = data_url(file)
    body = {"messages": [user({"type": "image_url", "image_url": url})]}
    asking = asyncio.create_task(asked(http, CHAT, body))
    request = await tokenizer.answer("a")
    assert files_of(request) == [file]
    assert (await asking)[0] == 200
