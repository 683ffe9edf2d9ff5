"""Slow bodies of 16 MB stall nobody: real processes on two busy cores."""

import asyncio
import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.fleet import Fleet, running_fleet
from shared.model_folder import EMBEDDED_MODEL
from tests.hostile.shapes import SHAPES, Shape
from tests.mesh.forks import fork

BODY_BYTES = (16 << 20) - 4096
MAX_STALL_S = 0.1
NUM_TRIES = 3  # another process's use of a core is not our stall
CHAT = {"messages": [{"role": "user", "content": "What is 12 * 34?"}], "max_tokens": 24}


@pytest.fixture
def _busy_cores() -> Iterator[None]:
    burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for each in burning:
        each.kill()
        each.wait()


async def started(directory: Path, fleet: Fleet) -> str:
    stalls = directory / "stalls"
    stalls.mkdir()
    settings = {"MODEL": str(EMBEDDED_MODEL), "TEST_STALLS": str(stalls)}
    await fleet.start("scheduler")
    await fleet.start("worker", MODEL=str(EMBEDDED_MODEL))
    await fleet.start("tokenizer", "tests.hostile.watched_tokenizer", **settings)
    gateway = await fleet.start("gateway", "tests.hostile.watched_gateway", **settings)
    await fleet.until_ready()
    return gateway.url


async def chat_on(session: aiohttp.ClientSession, url: str, statuses: list[int]) -> None:
    """An innocent client: one chat after the other."""
    while True:
        async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
            await response.read()
            statuses.append(response.status)


async def longest_stall_s(
    session: aiohttp.ClientSession, url: str, stalls: Path, shape: Shape
) -> float:
    """Of the gateway's loop and the tokenizer's, while two clients send ``shape`` at once."""
    for name in ("gateway", "tokenizer"):
        (stalls / name).unlink(missing_ok=True)
    await asyncio.sleep(0.05)
    body = shape.body(BODY_BYTES)

    async def send() -> int:
        headers = {"Content-Type": "application/json"}
        async with session.post(
            url + shape.path, data=io.BytesIO(body), headers=headers
        ) as response:
            await response.read()
            return response.status

    for status in await asyncio.gather(send(), send()):
        assert status in (200, 400), f"{shape}: {status}"
    await asyncio.sleep(0.05)
    return max(float(path.read_text() or 0) for path in stalls.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("_busy_cores")
async def test_no_body_stops_an_event_loop(tmp_path: Path, subtests: pytest.Subtests) -> None:
    statuses: list[int] = []
    async with running_fleet(tmp_path, {}, fork) as fleet:
        url = await started(tmp_path, fleet)
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(chat_on(session, url, statuses)) for _ in range(4)]
            for shape in SHAPES:
                with subtests.test(shape=str(shape)):
                    found: list[float] = []
                    while len(found) < NUM_TRIES and (not found or min(found) > MAX_STALL_S):
                        found.append(
                            await longest_stall_s(session, url, tmp_path / "stalls", shape)
                        )
                    print(f"{shape}: {[round(1000 * each) for each in found]} ms", flush=True)
                    assert min(found) <= MAX_STALL_S
            for client in clients:
                client.cancel()
        assert {*statuses} == {200}
