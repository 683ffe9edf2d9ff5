"""A service's effects on its own process, and its behaviour without free descriptors."""

import asyncio
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import AF_UNIX
from socket import socket as StreamSocket  # noqa: N812

import aiohttp
import pytest

from shared.link.address import admin_path, socket_path
from tests.shared.recorder import Recorder, got

ROOT = Path(__file__).parents[3]
MAX_FILES = 64
TIMEOUT_S = 60

TELLS_ITS_LIMITS = """
import resource, sys
from shared.settings.scheduler import SchedulerConfig
from shared.errors import ConfigError
from shared.process.service import main

class Ready:
    def __init__(self, config): pass
    def status(self): raise AssertionError("it is not asked yet")
    async def run(self):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise ConfigError(f"files {limits}, switch {sys.getswitchinterval()}")

main("scheduler", SchedulerConfig, Ready)
"""


def lower_limits(soft: int, hard: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_service_takes_all_files_it_may_have_and_its_loop_waits_shortly_for_threads(
    tmp_path: Path,
):
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 500)
    done = subprocess.run(
        [sys.executable, "-c", TELLS_ITS_LIMITS, "--mesh-dir", str(tmp_path)],
        preexec_fn=lambda: lower_limits(100, hard),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert f"shoal scheduler: files ({hard}, {hard}), switch 0.0005" in done.stderr


@asynccontextmanager
async def with_few_files(
    directory: Path, service: str, *flags: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{service}", "--mesh-dir", str(directory), *flags),
        preexec_fn=lambda: lower_limits(MAX_FILES, MAX_FILES),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def until_logged(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(TIMEOUT_S):
        while text not in (line := (await process.stderr.readline()).decode()):
            assert line, f"it ended and never logged {text}"


@pytest.mark.seconds
async def test_a_service_out_of_files_goes_on_and_finds_its_peers_when_there_are_some_again(
    tmp_path: Path,
):
    path = admin_path(tmp_path, "gateway", "g0")
    tokenizer = Recorder("tokenizer", "t0")
    async with with_few_files(tmp_path, "gateway", "--instance=g0", "--port=0") as process:
        await until_logged(process, "listening")
        idle = connected(path, MAX_FILES)
        tokenizer.link.listen(tmp_path, "gateway")
        running = asyncio.create_task(tokenizer.link.run())
        await until_logged(process, f"{tmp_path}: Too many open files")
        for each in idle:
            each.close()
        assert (await got(tokenizer.ups)).hello.instance == "g0"
        assert await metric(path, "shoal_lookups_failed_total") > 0
        assert process.returncode is None
        running.cancel()
        await tokenizer.link.close("test over")


@pytest.mark.seconds
async def test_a_service_out_of_files_accepts_its_peers_when_there_are_some_again(tmp_path: Path):
    path = socket_path(tmp_path, "tokenizer", "t0")
    gateway = Recorder("gateway", "g0")
    async with with_few_files(tmp_path, "tokenizer", "--instance=t0") as process:
        while not path.exists():
            await asyncio.sleep(0.05)
        idle = connected(path, MAX_FILES)
        await until_logged(process, "accepts nobody: Too many open files")
        for each in idle:
            each.close()
        gateway.link.dial("tokenizer", tmp_path)
        running = asyncio.create_task(gateway.link.run())
        assert (await got(gateway.ups)).hello.instance == "t0"
        running.cancel()
        await gateway.link.close("test over")


def connected(path: Path, num: int) -> list[StreamSocket]:
    sockets = [StreamSocket(AF_UNIX) for _ in range(num)]
    for each in sockets:
        each.connect(str(path))
    return sockets


async def metric(path: Path, name: str) -> float:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
        session.get("http://admin/metrics") as response,
    ):
        lines = (await response.text()).splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))
