"""A worker of two processes, ranks or stages, loses one of them under 32 streams: ten times."""

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.checked_load import body_of, stream
from tests.cli.serving import Serving, is_alive, serving
from tests.cli.test_ranks import rank_of, worker_of

FLAGS = ("--dtype", "float32", "--max-model-len", "512")
NUM_STREAMS = 32
NUM_TOKENS = 160
NUM_KILLS = 10
BEGUN = 5  # tokens
WAIT_S = 120


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["tensor-parallel-size", "pipeline-parallel-size"])
async def test_32_texts_outlive_ten_losses_of_either_process(tmp_path: Path, kind: str) -> None:
    async with serving(tmp_path, f"--{kind}", "2", *FLAGS) as shoal:
        await shoal.until_ready()
        texts = await asyncio.gather(*streams(shoal, [[] for _ in range(NUM_STREAMS)]))
        for number in range(NUM_KILLS):
            times_s: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
            running = asyncio.gather(*streams(shoal, times_s))
            await until_begun(times_s)
            await kill(shoal, number % 2)
            assert await running == texts


def streams(shoal: Serving, times_s: list[list[float]]) -> list[asyncio.Task[str]]:
    """One for each list, which gets the times of its tokens behind that of the request."""
    return [asyncio.create_task(text_of(shoal, number, of)) for number, of in enumerate(times_s)]


async def text_of(shoal: Serving, number: int, times_s: list[float]) -> str:
    async with aiohttp.ClientSession() as session:
        return await stream(session, shoal.url, body_of(number, NUM_TOKENS), times_s)


async def until_begun(times_s: list[list[float]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(len(each) <= BEGUN for each in times_s):
            await asyncio.sleep(0.02)


async def kill(shoal: Serving, rank: int) -> None:
    """Kills one of the two, and waits for others in their place."""
    follower = rank_of(shoal, 1)
    assert follower is not None
    lost = [worker_of(shoal), follower]
    os.kill(lost[rank], signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while any(map(is_alive, lost)) or rank_of(shoal, 1) is None:
            await asyncio.sleep(0.05)
