"""The scheduler is stopped on purpose: requests that wait for its successor, and others."""

import asyncio
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.fleet import running_fleet
from tests.mesh.forks import fork
from tests.mesh.mesh import TEXT, running_mesh
from tests.mesh.test_chain import client_of, complete

SETTINGS = {"READY_WAIT_S": "30", "DRAIN_TIMEOUT_S": "50"}


@pytest.mark.slow
async def test_a_scheduler_that_is_replaced_holds_up_no_request(tmp_path: Path):
    """The open stream stands still, so a scheduler waiting for its end would outlast the new
    requests."""
    async with running_fleet(tmp_path, SETTINGS | {"TEST_STEPS": str(tmp_path)}, fork) as fleet:
        for kind in ("scheduler", "tokenizer", "gateway"):
            await fleet.start(kind)
        await fleet.start("worker", module="tests.mesh.wide_worker")
        await fleet.until_ready()
        hold = tmp_path / "hold"
        hold.touch()
        (gateway,), (scheduler,) = fleet.of("gateway"), fleet.of("scheduler")
        async with aiohttp.ClientSession() as session:

            async def ask(max_tokens: int) -> dict:
                body = {"prompt": [5], "max_tokens": max_tokens}
                async with session.post(f"{gateway.url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            before = asyncio.create_task(ask(30))
            while not (await scheduler.metrics())["shoal_sequences"]:
                await asyncio.sleep(0.02)
            leaving = asyncio.create_task(fleet.stop(scheduler))
            meanwhile = asyncio.create_task(ask(31))
            assert await leaving == 0
            after = asyncio.create_task(ask(32))
            await fleet.start("scheduler")
            hold.unlink()
            replies = await asyncio.gather(before, meanwhile, after)
        assert [each["usage"]["completion_tokens"] for each in replies] == [30, 31, 32]
        await fleet.until_idle()


async def test_a_scheduler_stopped_with_its_tokenizers_ends_open_requests(
    tmp_path: Path,
):
    async with running_mesh(tmp_path, step_s=0.01) as mesh, client_of(mesh) as client:

        async def leave(name: str) -> None:
            await mesh.services[name].drain()
            await mesh.lose(name)

        stream = await complete(client, 100, stream=True)
        chunks = [await anext(stream)]
        leaving = [asyncio.create_task(leave(name)) for name in ("tokenizer", "scheduler")]
        chunks += [chunk async for chunk in stream]
        await asyncio.gather(*leaving)
        text = "".join([chunk.choices[0].text for chunk in chunks])
        assert text == (TEXT * 40)[: len(text)]
        assert chunks[-1].choices[0].finish_reason == "length"
