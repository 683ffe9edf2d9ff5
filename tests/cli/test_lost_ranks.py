"""A worker of several processes, ranks or stages, loses one of them under 32 streams: ten times."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.checked_load import body_of, stream
from benchmarks.processes import parent_of
from tests.cli.serving import Serving, is_alive, serving
from tests.cli.test_hosts import two_hosts
from tests.cli.test_ranks import rank_of

FLAGS = ("--dtype", "float32", "--max-model-len", "512")
RANKS_OF_HOST = 2
NUM_STREAMS = 32
NUM_TOKENS = 160
NUM_KILLS = 10
BEGUN = 5  # tokens
WAIT_S = 120


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["tensor-parallel-size", "pipeline-parallel-size"])
@pytest.mark.parametrize("num", [2, 4])
async def test_32_texts_outlive_ten_losses_of_any_process(
    tmp_path: Path, kind: str, num: int
) -> None:
    async with hosts_of(tmp_path, kind, num) as hosts:
        texts = await asyncio.gather(*streams(hosts[0], [[] for _ in range(NUM_STREAMS)]))
        for number in range(NUM_KILLS):
            times_s: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
            running = asyncio.gather(*streams(hosts[0], times_s))
            await until_begun(times_s)
            await kill(hosts, number % num)
            assert await running == texts


@asynccontextmanager
async def hosts_of(folder: Path, kind: str, num: int) -> AsyncIterator[list[Serving]]:
    """Two processes are on one host, four on two."""
    if num == RANKS_OF_HOST:
        async with serving(folder, f"--{kind}", str(num), *FLAGS) as shoal:
            await shoal.until_ready()
            yield [shoal]
    else:
        async with two_hosts(folder, num, kind) as hosts:
            yield hosts


def streams(shoal: Serving, times_s: list[list[float]]) -> list[asyncio.Task[str]]:
    """One stream for each list, which receives the times of the request and of its tokens."""
    return [asyncio.create_task(text_of(shoal, number, of)) for number, of in enumerate(times_s)]


async def text_of(shoal: Serving, number: int, times_s: list[float]) -> str:
    async with aiohttp.ClientSession() as session:
        return await stream(session, shoal.url, body_of(number, NUM_TOKENS), times_s)


async def until_begun(times_s: list[list[float]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while any(len(each) <= BEGUN for each in times_s):
            await asyncio.sleep(0.02)


async def kill(hosts: list[Serving], rank: int) -> None:
    """Kills one process, and waits for the restart of all."""
    lost = [pid for second in seconds_of(hosts) if second for pid in (parent_of(second), second)]
    os.kill(lost[rank], signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        while any(map(is_alive, lost)) or None in seconds_of(hosts):
            await asyncio.sleep(0.05)


def seconds_of(hosts: list[Serving]) -> list[int | None]:
    """The process id of the second rank of each host, started by the host's first one."""
    return [rank_of(host, index * RANKS_OF_HOST + 1) for index, host in enumerate(hosts)]
