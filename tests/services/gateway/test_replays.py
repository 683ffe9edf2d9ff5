"""Requests waiting for a tokenizer: retries and wake-ups."""

import asyncio
import time
from typing import Any

import pytest

from services.gateway.mesh.losses import MAX_REPLAYS, Backoff
from services.gateway.mesh.mesh import Mesh
from services.gateway.mesh.tokenizers import Tokenizer
from shared.errors import Unavailable
from shared.link.link import Link
from shared.link.peer import Peer
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Lost,
    RequestKey,
    State,
)
from tests.services.gateway.client import Client, with_settings
from tests.services.gateway.fakes import MODEL, FakeTokenizer, Submitted

LONG = with_settings(replay_s=30)


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


@with_settings(replay_s=2)
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
    client: Client, status: int, details: dict[str, Any], most: int
) -> None:
    asked, request = await client.begun()
    refused: list[Submitted] = []
    refusing = asyncio.create_task(refuse_all(client.tokenizer, refused, status, **details))
    lose(request)
    answer = await asked
    assert (answer.status, answer.error["message"]) == (status, "no room")
    refusing.cancel()
    assert 1 <= len(refused) <= most


@LONG
async def test_services_that_die_under_a_request_are_counted_and_others_are_not(
    client: Client,
) -> None:
    asked, request = await client.begun()
    for is_explained in [True, False, True, False, True]:
        lose(request, is_explained)
        request = await client.tokenizer.submitted.get()
    lose(request)
    answer = await asked
    assert (answer.status, answer.error["code"]) == (500, "too_many_replays")
    assert answer.headers["X-Should-Retry"] == "false"


@LONG
@pytest.mark.seconds
@pytest.mark.parametrize("standing", ["gateway", "tokenizer", "neither"])
async def test_tokenizers_lost_while_one_of_us_stood_still_are_not_counted(
    client: Client, monkeypatch: pytest.MonkeyPatch, standing: str
) -> None:
    monkeypatch.setattr(Link, "stood_still", standing == "gateway")
    link = client.tokenizer.link
    asked, request = await client.begun()
    for _ in range(MAX_REPLAYS):
        link.drop(request.peer, "silent")
        if standing == "tokenizer":
            link._stood_still_s = time.monotonic()
        request = await client.tokenizer.submitted.get()
    link.drop(request.peer, "silent")
    if standing == "neither":
        assert (await asked).error["code"] == "too_many_replays"
    else:
        assert (await client.tokenizer.submitted.get()).key[0] == request.key[0]
        asked.cancel()


@LONG
async def test_a_scheduler_that_stood_still_is_not_counted(client: Client) -> None:
    asked, request = await client.begun()
    for number in range(MAX_REPLAYS + 1):
        name = f"s{number}"
        request.peer.send(Lost([RequestKey(*request.key)], scheduler=name))
        request.peer.send(Lost([], is_explained=True, scheduler=name))
        request = await client.tokenizer.submitted.get()
    assert not asked.done()
    asked.cancel()


def test_pauses_double_up_to_a_bound() -> None:
    backoff, times = Backoff(1.0, 4.0), []
    for _ in range(4):
        backoff.wait(100.0)
        times.append(backoff.retry_at_s)
    backoff.wait(100.0, at_least_s=30.0)
    assert [*times, backoff.retry_at_s] == [101.0, 102.0, 104.0, 104.0, 130.0]


async def test_requests_waiting_for_a_tokenizer_wake_only_on_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, num = Mesh(30, 60, accept_timeout_s=1), 50
    hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", "t", MODEL)
    peer = Peer(hello, lambda peer, message, arrays: None)
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
