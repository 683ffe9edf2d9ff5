"""Start-up time: the whole mesh to ready and to the first token, and each service alone.

A service alone has started when its admin port reports only its neighbours as missing.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness.ports import free_port
from benchmarks.report import spread, write
from shared.link.address import admin_path
from shared.wire.messages import ServiceName

TIMEOUT_S = 120
POLL_S = 0.02
LACKS_ONLY_NEIGHBOURS: dict[ServiceName, str] = {
    "gateway": "no tokenizer is connected",
    "tokenizer": "no scheduler is connected",
    "scheduler": "no worker is connected",
    "worker": "no scheduler is connected",
}
PROMPT = {
    "messages": [{"role": "user", "content": "What is 2 + 3?"}],
    "stream": True,
    "temperature": 0,
}


async def time_mesh() -> tuple[float, float]:
    """Seconds from ``shoal serve`` to ready and to the first token of a chat."""
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        started_s = time.perf_counter()
        process = await _start("-c", "from cli.main import main; main()", "serve",
                               "--port", str(port), "--mesh-dir", directory)  # fmt: skip
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                await _until(lambda: _is_ready(session))
                ready_s = time.perf_counter() - started_s
                await _first_token(session)
                return ready_s, time.perf_counter() - started_s
        finally:
            process.send_signal(signal.SIGINT)
            await process.wait()


async def time_service(service: ServiceName) -> float:
    """Seconds from the start of the process until only its neighbours are missing."""
    with tempfile.TemporaryDirectory() as directory:
        started_s = time.perf_counter()
        process = await _start(
            *("-m", f"services.{service}", "--mesh-dir", directory, "--instance", "0"),
            *(("--port", "0") if service == "gateway" else ()),
        )
        connector = aiohttp.UnixConnector(str(admin_path(Path(directory), service, "0")))
        try:
            async with aiohttp.ClientSession("http://admin", connector=connector) as session:
                await _until(lambda: _has_started(session, service))
                return time.perf_counter() - started_s
        finally:
            process.kill()
            await process.wait()


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=Path(__file__).parent.parent,
        env=dict(os.environ),
    )


async def _until(is_true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await is_true():
            await asyncio.sleep(POLL_S)


async def _is_ready(session: aiohttp.ClientSession) -> bool:
    try:
        async with session.get("/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _has_started(session: aiohttp.ClientSession, service: ServiceName) -> bool:
    try:
        async with session.get("/status") as response:
            return (await response.json())["reason"] == LACKS_ONLY_NEIGHBOURS[service]
    except aiohttp.ClientError:
        return False


async def _first_token(session: aiohttp.ClientSession) -> None:
    async with session.post("/v1/chat/completions", json=PROMPT) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                choices: list[Any] = json.loads(line[6:])["choices"]
                if choices and choices[0]["delta"].get("content"):
                    return
    raise RuntimeError(f"no token came; status {response.status}")


async def measure(num_runs: int) -> dict[str, Any]:
    meshes = [await time_mesh() for _ in range(num_runs)]
    alone = {
        service: spread([await time_service(service) for _ in range(num_runs)])
        for service in LACKS_ONLY_NEIGHBOURS
    }
    return {
        "serve to ready, s": spread([ready_s for ready_s, _ in meshes]),
        "serve to first token, s": spread([token_s for _, token_s in meshes]),
        "service alone, s": alone,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    write("startup", asyncio.run(measure(parser.parse_args().runs)))
