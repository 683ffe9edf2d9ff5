"""A gateway as a process of its own, on the event loop that it has in service."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.harness.ports import free_port

ROOT = Path(__file__).parents[3]


@dataclass
class GatewayProcess:
    process: asyncio.subprocess.Process
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def metric(self, name: str) -> float:
        """The sum over its labels."""
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    async def until_ready(self) -> None:
        async with asyncio.timeout(60), aiohttp.ClientSession() as http:
            while self.process.returncode is None:
                try:
                    async with http.get(f"{self.url}/ready") as response:
                        if response.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)


@asynccontextmanager
async def gateway_process(
    mesh_dir: Path, *flags: str, num_files: int = 4096
) -> AsyncIterator[GatewayProcess]:
    """One that may open ``num_files``, when it is ready."""
    port = free_port()
    words = [sys.executable, "-m", "services.gateway", "--port", str(port)]
    words += ["--mesh-dir", str(mesh_dir), *flags]
    limited = f'ulimit -n {num_files} && exec "$@"'
    process = await asyncio.create_subprocess_exec("sh", "-c", limited, "sh", *words, cwd=ROOT)
    gateway = GatewayProcess(process, port)
    try:
        await gateway.until_ready()
        yield gateway
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
