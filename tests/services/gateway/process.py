"""A gateway in its own process, on its production event loop."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.harness.ports import free_port
from benchmarks.harness.ready import until_ready

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


@asynccontextmanager
async def gateway_process(
    mesh_dir: Path, *flags: str, num_files: int = 4096
) -> AsyncIterator[GatewayProcess]:
    """A ready gateway that may open ``num_files``."""
    port = free_port()
    words = [sys.executable, "-m", "services.gateway", "--port", str(port)]
    words += ["--mesh-dir", str(mesh_dir), *flags]
    limited = f'ulimit -n {num_files} && exec "$@"'
    process = await asyncio.create_subprocess_exec("sh", "-c", limited, "sh", *words, cwd=ROOT)
    gateway = GatewayProcess(process, port)
    try:
        await until_ready(gateway.url, process)
        yield gateway
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()
