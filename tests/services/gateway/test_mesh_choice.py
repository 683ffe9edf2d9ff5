"""The choice of a tokenizer for a request."""

import asyncio
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from services.gateway.mesh.job import Prompt
from services.gateway.mesh.tokenizers import FIRST_PAUSE_S, MAX_PAUSE_S, Probation
from services.gateway.service import GatewayService
from shared.errors import InternalError
from shared.wire.messages import State
from tests.services.gateway.fakes import FakeTokenizer, Submitted, fake_tokenizer, until


async def test_requests_spread_over_the_tokenizers_and_avoid_one_that_drains(
    tmp_path: Path,
    gateway: GatewayService,
    tokenizer: FakeTokenizer,
    http: aiohttp.ClientSession,
) -> None:
    async def status() -> int:
        async with http.post("/v1/completions", json={"prompt": "a"}) as response:
            return response.status

    def post() -> asyncio.Task[int]:
        return asyncio.create_task(status())

    async with fake_tokenizer(tmp_path, "t2") as other:
        await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 2)
        tasks = [post(), post()]
        open_requests = [await tokenizer.submitted.get(), await other.submitted.get()]
        other.state = State.DRAINING
        other.link.send_status()
        await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 1)
        tasks += [post(), post()]
        open_requests += [await tokenizer.submitted.get(), await tokenizer.submitted.get()]
        for request in open_requests:
            request.accept()
            request.finish()
        assert await asyncio.gather(*tasks) == [200] * 4
        assert other.submitted.empty()


async def test_a_tokenizer_that_fails_conversions_does_not_attract_them_all(
    tmp_path: Path, gateway: GatewayService, tokenizer: FakeTokenizer
) -> None:
    prompt = Prompt("text", np.frombuffer(b"a", np.uint8))

    async with fake_tokenizer(tmp_path, "t2") as other:
        tokenizer.conversion_error = InternalError("no vocabulary")
        await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 2)
        for _ in range(30):
            ids = await gateway._mesh.conversions.convert("", prompt, True)
            assert len(ids) == 1
        assert 1 <= len(tokenizer.converted) <= 3, "the first, and one more after each pause"
        assert len(other.converted) == 30


async def test_a_tokenizer_that_fails_everything_at_once_does_not_attract_all(
    tmp_path: Path,
    gateway: GatewayService,
    tokenizer: FakeTokenizer,
    http: aiohttp.ClientSession,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The good one's requests stay open, so the other always has fewer."""

    async def status() -> int:
        async with http.post("/v1/completions", json={"prompt": "a"}) as response:
            return response.status

    async def serve(fake: FakeTokenizer, accepts: int) -> None:
        for number in count():
            request = await fake.submitted.get()
            if number < accepts:
                request.accept()
                open_requests.append(request)
            else:
                failed.append(request)
                request.fail(500, "internal_error", "no template")

    failed: list[Submitted] = []
    open_requests: list[Submitted] = []
    async with fake_tokenizer(tmp_path, "t2") as broken:
        await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 2)
        serving = [
            asyncio.create_task(serve(tokenizer, accepts=100)),
            asyncio.create_task(serve(broken, accepts=1)),
        ]
        tasks = []
        for number in range(40):
            tasks.append(asyncio.create_task(status()))
            await until(lambda: len(open_requests) + sum(each.done() for each in tasks) > number)  # noqa: B023
        for request in open_requests:
            request.finish()
        statuses = await asyncio.gather(*tasks)
        for task in serving:
            task.cancel()
    assert statuses == [200] * 40
    assert 1 <= len(failed) <= 5, "and one more after each pause, where the machine is slow"
    assert "tokenizer t2 failed a request (internal_error)" in caplog.text


@pytest.mark.parametrize("fields", [{}, {"return_token_offsets": True}])
async def test_a_request_that_two_tokenizers_fail_is_at_fault(
    tmp_path: Path,
    gateway: GatewayService,
    tokenizer: FakeTokenizer,
    http: aiohttp.ClientSession,
    fields: Any,
) -> None:
    async def fail_all(fake: FakeTokenizer) -> None:
        while True:
            (await fake.submitted.get()).fail(500, "internal_error", "no template")

    async with fake_tokenizer(tmp_path, "t2") as other:
        await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 2)
        for each in gateway._mesh.tokenizers:
            each.probation.succeed()
        for fake in (tokenizer, other):
            fake.conversion_error = InternalError("no template")
        failing = [asyncio.create_task(fail_all(fake)) for fake in (tokenizer, other)]
        body = {"prompt": "a"} | fields
        async with http.post("/v1/completions", json=body) as response:
            assert response.status == 500
            assert (await response.json())["error"]["message"] == "no template"
        for task in failing:
            task.cancel()
        assert all(each.probation.is_over for each in gateway._mesh.tokenizers)
        assert all(each.num_open == 0 for each in gateway._mesh.tokenizers)


def test_a_new_tokenizer_gets_one_request_at_a_time() -> None:
    probation = Probation()
    assert probation.admits(num_open=0, now_s=0)
    assert not probation.admits(num_open=1, now_s=0)
    probation.succeed()
    assert probation.admits(num_open=1, now_s=0)


def test_a_failing_tokenizer_pauses_longer_until_it_accepts_a_request() -> None:
    probation, pauses = Probation(), []
    probation.succeed()
    for _ in range(8):
        probation.fail(now_s=0)
        pauses.append(next(s for s in range(100) if probation.admits(num_open=0, now_s=s)))
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == MAX_PAUSE_S
    probation.succeed()
    probation.fail(now_s=0)
    assert probation.admits(num_open=0, now_s=FIRST_PAUSE_S)
