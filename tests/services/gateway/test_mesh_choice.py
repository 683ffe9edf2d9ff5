"""Which tokenizer gets a request."""

import asyncio
from pathlib import Path

import aiohttp

from services.gateway.service import GatewayService
from shared.messages import State
from tests.services.gateway.fakes import FakeTokenizer, fake_tokenizer, until


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
        other.link.tell_status()
        await until(lambda: sum(peer.is_ready for peer in gateway.link.peers) == 1)
        tasks += [post(), post()]
        open_requests += [await tokenizer.submitted.get(), await tokenizer.submitted.get()]
        for request in open_requests:
            request.accept()
            request.finish()
        assert await asyncio.gather(*tasks) == [200] * 4
        assert other.submitted.empty()
