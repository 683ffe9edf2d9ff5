"""The choice of a tokenizer for a request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest

from services.gateway.mesh.job import Prompt
from services.gateway.mesh.tokenizers import FIRST_PAUSE_S, MAX_PAUSE_S, Probation
from shared.errors import InternalError
from shared.wire.messages import State
from tests.services.gateway.client import TEXT, Asked, Client
from tests.services.gateway.fakes import FakeTokenizer, Submitted, fake_tokenizer, until


@asynccontextmanager
async def second_tokenizer(client: Client) -> AsyncIterator[FakeTokenizer]:
    async with fake_tokenizer(client.gateway._config.mesh_dir, "t2") as other:
        await until(lambda: num_ready(client) == 2)
        yield other


def num_ready(client: Client) -> int:
    return sum(peer.is_ready for peer in client.gateway.link.peers)


def post(client: Client) -> Asked:
    return asyncio.create_task(client.post(TEXT, prompt="a"))


async def test_requests_spread_over_the_tokenizers_and_avoid_one_that_drains(
    client: Client,
) -> None:
    tokenizer = client.tokenizer
    async with second_tokenizer(client) as other:
        tasks = [post(client), post(client)]
        open_requests = [await tokenizer.submitted.get(), await other.submitted.get()]
        other.state = State.DRAINING
        other.link.send_status()
        await until(lambda: num_ready(client) == 1)
        tasks += [post(client), post(client)]
        open_requests += [await tokenizer.submitted.get(), await tokenizer.submitted.get()]
        for request in open_requests:
            request.accept()
            request.finish()
        assert [answer.status for answer in await asyncio.gather(*tasks)] == [200] * 4
        assert other.submitted.empty()


async def test_a_tokenizer_that_fails_conversions_does_not_attract_them_all(client: Client) -> None:
    prompt = Prompt("text", np.frombuffer(b"a", np.uint8))
    client.tokenizer.conversion_error = InternalError("no vocabulary")
    async with second_tokenizer(client) as other:
        for _ in range(30):
            ids = await client.gateway._mesh.conversions.convert("", prompt, True)
            assert len(ids) == 1
        num_failed = len(client.tokenizer.converted)
        assert 1 <= num_failed <= 3, "the first, and one more after each pause"
        assert len(other.converted) == 30


async def test_a_tokenizer_that_fails_everything_at_once_does_not_attract_all(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The good one's requests stay open, so the other always has fewer."""

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
    async with second_tokenizer(client) as broken:
        accepted = {client.tokenizer: 100, broken: 1}
        serving = [asyncio.create_task(serve(fake, num)) for fake, num in accepted.items()]
        tasks: list[Asked] = []
        for number in range(40):
            tasks.append(post(client))
            await until(lambda: len(open_requests) + sum(each.done() for each in tasks) > number)  # noqa: B023
        for request in open_requests:
            request.finish()
        answers = await asyncio.gather(*tasks)
        for task in serving:
            task.cancel()
    assert [answer.status for answer in answers] == [200] * 40
    assert 1 <= len(failed) <= 5, "and one more after each pause, where the machine is slow"
    assert "tokenizer t2 failed a request (internal_error)" in caplog.text


@pytest.mark.parametrize("fields", [{}, {"return_token_offsets": True}])
async def test_a_request_that_two_tokenizers_fail_is_at_fault(client: Client, fields: Any) -> None:
    async def fail_all(fake: FakeTokenizer) -> None:
        while True:
            (await fake.submitted.get()).fail(500, "internal_error", "no template")

    async with second_tokenizer(client) as other:
        tokenizers = client.gateway._mesh.tokenizers
        for each in tokenizers:
            each.probation.succeed()
        for fake in (client.tokenizer, other):
            fake.conversion_error = InternalError("no template")
        failing = [asyncio.create_task(fail_all(fake)) for fake in (client.tokenizer, other)]
        error = await client.refused(500, TEXT, prompt="a", **fields)
        assert error["message"] == "no template"
        for task in failing:
            task.cancel()
        assert all(each.probation.is_over for each in tokenizers)
        assert all(each.num_open == 0 for each in tokenizers)


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
