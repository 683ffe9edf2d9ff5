"""``shoal serve`` as a user starts it: a process of its own, with all its children."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import httpx2
from openai import AsyncOpenAI

from benchmarks.harness.admin import metrics_of
from benchmarks.harness.ports import free_port
from benchmarks.harness.ready import until_ready
from benchmarks.processes import services_of


@dataclass
class Serving:
    process: asyncio.subprocess.Process
    port: int
    directory: Path
    uds: Path | None = None  # instead of the port
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def children(self) -> dict[str, int]:
        """Process ids by service, of live processes."""
        return services_of(self.directory)

    def client(self) -> AsyncOpenAI:
        transport = None if self.uds is None else httpx2.AsyncHTTPTransport(uds=str(self.uds))
        http_client = httpx2.AsyncClient(transport=transport, timeout=90)
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", http_client=http_client)

    async def until_ready(self) -> None:
        connector = None if self.uds is None else aiohttp.UnixConnector(str(self.uds))
        await until_ready(
            self.url, self.process, lambda: "\n".join(self.lines), connector=connector
        )

    async def metrics(self, service: str) -> dict[str, float]:
        return await metrics_of(service, self.directory)

    async def read_lines(self) -> None:
        if self.process.stdout is None:
            return
        async for line in self.process.stdout:
            self.lines.append(line.decode().rstrip())


@asynccontextmanager
async def serving(
    directory: Path,
    *flags: str,
    stdout: int = asyncio.subprocess.PIPE,
    prefix: Sequence[str] = (),
    uds: Path | None = None,
) -> AsyncIterator[Serving]:
    """Reads ``lines`` from ``stdout`` if it is a pipe. By default workers have one thread and no
    scheduler stands by, since other tests need the cores. ``prefix`` are words before the
    command."""
    port = free_port()
    flags = flags if uds is None else (*flags, "--uds", str(uds))
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-c", "from cli.main import main; main()", "serve"),
        *("--port", str(port), "--mesh-dir", str(directory), *flags),
        stdout=stdout,
        stderr=asyncio.subprocess.STDOUT,
        cwd=Path(__file__).parent.parent.parent,
        env={"SHOAL_NUM_THREADS": "1", "SHOAL_SCHEDULERS": "1"} | os.environ,
    )
    serving = Serving(process, port, directory, uds)
    reading = asyncio.create_task(serving.read_lines())
    try:
        yield serving
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await asyncio.wait_for(process.wait(), 60)
        await reading


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter during the read
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"
