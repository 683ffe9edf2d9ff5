"""Real processes of all four services, started, stopped and killed one by one."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import aiohttp

from benchmarks.harness.ports import free_port
from cli.run_directory import sockets_of
from shared.link.address import admin_path
from shared.wire.messages import ServiceName

READY_TIMEOUT_S = 120
NUM_LOG_LINES = 20  # of each service
TOKENIZER_PEERS = 'shoal_peers{service="tokenizer"}'
ROOT = Path(__file__).parent.parent.parent


class Process(Protocol):
    """The interface of ``asyncio.subprocess.Process`` that a fleet needs."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, signal: int) -> None: ...
    def kill(self) -> None: ...


Launch = Callable[[str, dict[str, str], Path], Awaitable[Process]]
"""Runs a module as a process with this environment and this log file."""


async def command_line(module: str, environment: dict[str, str], log_path: Path) -> Process:
    """Starts it from the command line, as a user does."""
    with log_path.open("wb") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            env=environment,
            cwd=ROOT,
            start_new_session=True,
            stderr=log,
        )


@dataclass(eq=False)
class Member:
    """One process of the fleet; ``port`` is set for a gateway."""

    kind: ServiceName
    instance: str
    process: Process
    directory: Path
    port: int = 0
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ask(self, path: str) -> str:
        """The answer of the admin port."""
        socket_path = admin_path(self.directory, self.kind, self.instance)
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket_path))) as session,
            session.get(f"http://admin/{path}", timeout=aiohttp.ClientTimeout(5)) as response,
        ):
            return await response.text()

    async def status(self) -> dict[str, Any]:
        """Empty without an answer."""
        try:
            status: dict[str, Any] = json.loads(await self.ask("status"))
        except (aiohttp.ClientError, TimeoutError):
            return {}
        return status

    async def metrics(self) -> dict[str, float]:
        """Values by name, with labels as written."""
        lines = (await self.ask("metrics")).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def until_ready(self) -> None:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while (await self.status()).get("state") != "ready":
                assert self.process.returncode is None, f"{self.kind} {self.instance} ended"
                await asyncio.sleep(0.05)

    async def end(self, number: signal.Signals) -> int:
        """Sends a terminating signal; returns the exit code."""
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 60)

    @property
    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def _variables(settings: dict[str, str]) -> dict[str, str]:
    return {
        name if name.startswith("TEST_") else f"SHOAL_{name}": text
        for name, text in settings.items()
    }


class Fleet:
    """Members of one mesh directory, with the same ``settings``; those that begin with TEST_ are
    for the modules of tests, not for services."""

    def __init__(self, directory: Path, settings: dict[str, str], launch: Launch) -> None:
        self.started: list[Member] = []
        self._directory = directory
        self._launch = launch
        self._environment = os.environ | _variables(settings)
        self._num_started = 0

    @property
    def members(self) -> list[Member]:
        """Members that have not ended."""
        return [member for member in self.started if member.process.returncode is None]

    def of(self, kind: str) -> list[Member]:
        return [member for member in self.members if member.kind == kind]

    async def start(self, kind: str, module: str = "", **settings: str) -> Member:
        """Starts a service and does not wait for it; ``module`` replaces the service's own."""
        self._num_started += 1
        instance, port = f"{kind[0]}{self._num_started}", 0
        directory = Path(settings.get("MESH_DIR", self._directory))
        own = _variables(settings)
        own |= {"SHOAL_MESH_DIR": str(directory), "SHOAL_INSTANCE": instance}
        if kind == "gateway":
            port = free_port()
            own["SHOAL_PORT"] = str(port)
        log_path = self._directory / f"{instance}.log"
        module = module or f"services.{kind}"
        process = await self._launch(module, self._environment | own, log_path)
        member = Member(cast(ServiceName, kind), instance, process, directory, port, settings)
        self.started.append(member)
        return member

    async def start_all(self, **nums: int) -> None:
        for kind, num in nums.items():
            for _ in range(num):
                await self.start(kind)
        await self.until_ready()

    async def until_ready(self) -> None:
        """Waits for every member, and for each gateway's link to every tokenizer."""
        for member in self.members:
            await member.until_ready()
        num_tokenizers = len(self.of("tokenizer"))
        async with asyncio.timeout(READY_TIMEOUT_S):
            for gateway in self.of("gateway"):
                while (await gateway.metrics())[TOKENIZER_PEERS] != num_tokenizers:
                    await asyncio.sleep(0.05)

    async def kill(self, member: Member) -> None:
        """Kills a member and removes its sockets, as ``shoal serve`` does; a stopped member removes
        its own."""
        await member.end(signal.SIGKILL)
        for path in sockets_of(member.directory, member.kind, member.instance):
            path.unlink(missing_ok=True)

    async def stop(self, member: Member) -> int:
        """Drains the member; returns the exit code."""
        return await member.end(signal.SIGTERM)

    async def until_idle(self) -> None:
        """Waits until every table of requests is empty and every block free. Raises
        TimeoutError."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not await self._is_idle():
                await asyncio.sleep(0.1)

    async def _is_idle(self) -> bool:
        for member in self.members:
            if (await member.status()).get("load") != 0:
                return False
        names = ('shoal_kv_blocks{state="used"}', "shoal_kv_block_leak", "shoal_sequences")
        metrics = [await scheduler.metrics() for scheduler in self.of("scheduler")]
        return not any(each[name] for each in metrics for name in names)


@asynccontextmanager
async def running_fleet(
    directory: Path, settings: dict[str, str], launch: Launch = command_line
) -> AsyncIterator[Fleet]:
    """On errors, prints the members that ended by themselves and the end of each log."""
    fleet = Fleet(directory, settings, launch)
    directory.chmod(0o700)
    try:
        yield fleet
    except BaseException:
        for member in fleet.members:
            if member.process.returncode is not None:
                print(f"{member.instance} has ended with {member.process.returncode}")
        for path in sorted(directory.glob("*.log")):
            print(f"--- {path.name}", *path.read_text().splitlines()[-NUM_LOG_LINES:], sep="\n")
        raise
    finally:
        for member in fleet.members:
            member.process.kill()
            await member.process.wait()
