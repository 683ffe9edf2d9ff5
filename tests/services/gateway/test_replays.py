"""Requests waiting for a tokenizer: retries and wake-ups."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.mesh.losses import MAX_REPLAYS, Backoff
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.tokenizers import Tokenizer
from shared.errors import Unavailable
from shared.link.link import Link
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Lost,
    Message,
    RequestKey,
    State,
)
from tests.services.gateway.fakes import (
    MODEL,
    FakeTokenizer,
    Submitted,
    running_gateway,
    until,
)
from tests.services.gateway.test_errors import error_of

TEXT = "/v1/completions"


@asynccontextmanager
async def asked(
    mesh_dir: Path, tokenizer: FakeTokenizer, replay_s: float
) -> AsyncIterator[tuple[asyncio.Task[aiohttp.ClientResponse], Submitted]]:
    """A request received by its tokenizer."""
    async with running_gateway(mesh_dir, replay_s=replay_s) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            task = asyncio.create_task(http.post(TEXT, json={"prompt": "a"}).__aenter__())
            yield task, await tokenizer.submitted.get()


def lose(request: Submitted, is_explained: bool = False) -> None:
    """Acts like a tokenizer without a scheduler."""
    request.peer.send(Lost([RequestKey(*request.key)], is_explained))


async def refuse_all(
    tokenizer: FakeTokenizer, refused: list[Submitted], status: int, **details: Any
) -> None:
    while True:
        request = await tokenizer.submitted.get()
        refused.append(request)
        request.fail(status, "full", "no room", **details)


@pytest.mark.parametrize(
    ("status", "details", "most"),
    [
        (503, {}, 6),  # after 0.05, 0.15, 0.35, 0.75, 1.55 and 2 s
        pytest.param(503, {"retry_after_s": 60.0}, 6, marks=pytest.mark.slow),
        (429, {"retry_after_s": 0.7}, 4),
        pytest.param(429, {"retry_after_s": 60.0}, 2, marks=pytest.mark.slow),
    ],
)
async def test_a_refused_replay_waits_longer_each_time_and_at_least_its_retry_after(
    tmp_path: Path, tokenizer: FakeTokenizer, status: int, details: dict[str, Any], most: int
) -> None:
    async with asked(tmp_path, tokenizer, replay_s=2) as (task, request):
        refused: list[Submitted] = []
        refusing = asyncio.create_task(refuse_all(tokenizer, refused, status, **details))
        lose(request)
        async with await task as response:
            assert response.status == status
            assert (await error_of(response))["message"] == "no room"
        refusing.cancel()
        assert 1 <= len(refused) <= most


async def test_services_that_die_under_a_request_are_counted_and_others_are_not(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with asked(tmp_path, tokenizer, replay_s=30) as (task, request):
        for is_explained in [True, False, True, False, True]:
            lose(request, is_explained)
            request = await tokenizer.submitted.get()
        lose(request)
        async with await task as response:
            assert response.status == 500
            assert (await error_of(response))["code"] == "too_many_replays"
            assert response.headers["X-Should-Retry"] == "false"


@pytest.mark.seconds
@pytest.mark.parametrize("stood_still", [True, False])
async def test_tokenizers_that_gave_us_up_while_we_stood_still_are_not_counted(
    tmp_path: Path, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch, stood_still: bool
) -> None:
    monkeypatch.setattr(Link, "stood_still", stood_still)
    async with asked(tmp_path, tokenizer, replay_s=30) as (task, request):
        for _ in range(MAX_REPLAYS):
            tokenizer.link.drop(request.peer, "silent")
            request = await tokenizer.submitted.get()
        tokenizer.link.drop(request.peer, "silent")
        if stood_still:
            assert (await tokenizer.submitted.get()).key[0] == request.key[0]
            task.cancel()
            return
        async with await task as response:
            assert (await error_of(response))["code"] == "too_many_replays"


@pytest.mark.seconds
@pytest.mark.parametrize("stood_still", [True, False])
async def test_tokenizers_that_stood_still_themselves_are_not_counted(
    tmp_path: Path, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch, stood_still: bool
) -> None:
    monkeypatch.setattr(Link, "stood_still", False)
    async with asked(tmp_path, tokenizer, replay_s=30) as (task, request):
        for _ in range(MAX_REPLAYS):
            tokenizer.link.drop(request.peer, "silent")
            if stood_still:
                tokenizer.link._stood_still_s = time.monotonic()
            request = await tokenizer.submitted.get()
        tokenizer.link.drop(request.peer, "silent")
        if stood_still:
            assert (await tokenizer.submitted.get()).key[0] == request.key[0]
            task.cancel()
            return
        async with await task as response:
            assert (await error_of(response))["code"] == "too_many_replays"


async def test_a_scheduler_that_stood_still_is_not_counted(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with asked(tmp_path, tokenizer, replay_s=30) as (task, request):
        for number in range(MAX_REPLAYS + 1):
            name = f"s{number}"
            request.peer.send(Lost([RequestKey(*request.key)], scheduler=name))
            request.peer.send(Lost([], is_explained=True, scheduler=name))
            request = await tokenizer.submitted.get()
        assert not task.done()
        task.cancel()


def test_pauses_double_up_to_a_bound() -> None:
    backoff, times = Backoff(1.0, 4.0), []
    for _ in range(4):
        backoff.wait(100.0)
        times.append(backoff.retry_at_s)
    backoff.wait(100.0, at_least_s=30.0)
    assert [*times, backoff.retry_at_s] == [101.0, 102.0, 104.0, 104.0, 130.0]


def new_peer() -> Peer:
    def send(peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None: ...

    return Peer(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", "t", MODEL), send)


async def test_requests_waiting_for_a_tokenizer_wake_only_on_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, peer, num = Mesh(30, 60, accept_timeout_s=1), new_peer(), 50
    ready, num_looks = mesh.tokenizers.ready, 0

    def looked() -> list[Tokenizer]:
        nonlocal num_looks
        num_looks += 1
        return ready()

    monkeypatch.setattr(mesh.tokenizers, "ready", looked)
    mesh.on_up(peer)
    waiting = [asyncio.create_task(mesh.tokenizers.ready_model()) for _ in range(num)]
    running = asyncio.create_task(mesh.run())
    await asyncio.sleep(0.3)
    for _ in range(3):
        peer.note_heartbeat(Heartbeat(State.NOT_READY, "still loading", 0, 0))
        await asyncio.sleep(0)
    assert num < num_looks <= num + 2, "a look each, and one at the loss"
    peer.note_heartbeat(Heartbeat(State.READY, "", 0, 0))
    assert await asyncio.gather(*waiting) == [MODEL] * num
    assert num_looks <= 2 * (num + 2)
    running.cancel()


async def test_a_request_that_waits_in_vain_fails_with_the_reason() -> None:
    mesh = Mesh(30, 0.01, accept_timeout_s=1)
    with pytest.raises(Unavailable, match="no tokenizer is connected"):
        await mesh.tokenizers.ready_model()
