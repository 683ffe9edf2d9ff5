"""The stack of compose/swarm.yml on a swarm, under a name of its own."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.harness.docker_engine import ROOT
from benchmarks.harness.ports import free_port
from benchmarks.harness.stack import CommandError, Stack
from cli.keys import write_keys
from shared.link.keys import SERVICES

READY_S = 180
FILE = "compose/swarm.yml"
# Equal requests give equal outputs only in float32, and test machines are small.
SETTINGS = "SHOAL_MAX_MODEL_LEN=512\nSHOAL_DTYPE=float32\nSHOAL_NUM_THREADS=1\n"
# The edge stays on the first node, with its port.
OVERRIDE = """
version: "3.8"
services:
  edge: {deploy: {placement: {constraints: [node.role == manager]}}}
"""


@dataclass
class Node:
    """A further node of the swarm."""

    id: str
    engine: Stack

    async def until_all_work(self) -> None:
        """Waits until each task there has had work."""
        await until_all_work(self.engine, (await self.engine.docker("ps", "-q")).split())


class Swarm:
    """``docker stack`` and ``docker service`` for one stack."""

    def __init__(self, engine: dict[str, str], folder: Path) -> None:
        self.name = f"shoal-test-{secrets.token_hex(3)}"
        self.port = free_port()
        self.settings = folder / "settings.env"
        self.settings.write_text(SETTINGS)
        override = folder / "mine.yml"
        override.write_text(OVERRIDE)
        self.files = [FILE, str(override)]
        write_keys(folder / "keys")
        variables = {
            "KEYS": str(folder / "keys"),
            "SHOAL_ENV": str(self.settings),
            "SHOAL_MODEL": str(ROOT / "models" / "shoal-tiny"),
            # Ports of the routing mesh need IPVS, which some kernels lack.
            "PUBLISH_MODE": "host",
            "PUBLISH_PORT": str(self.port),
            "EDGE_UPDATE_ORDER": "stop-first",
        }
        self._engine = Stack(engine | variables)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def docker(self, *arguments: str) -> str:
        """The command's output. Raises CommandError."""
        return await self._engine.docker(*arguments)

    async def build(self) -> None:
        await self._engine.build()

    async def deploy(self, *files: str, **variables: str) -> None:
        """With additional files, and their settings."""
        self._engine.environment |= variables
        options = [f"--compose-file={file}" for file in (*self.files, *files)]
        await self.docker("stack", "deploy", "--resolve-image=never", *options, self.name)

    async def scale(self, **nums: int) -> None:
        """Returns when this number of tasks runs and has been healthy for some seconds."""
        pairs = [f"{self.name}_{service}={num}" for service, num in nums.items()]
        await self.docker("service", "scale", *pairs)

    async def roll(self, service: str) -> None:
        """Replaces every task of a service, like a new image."""
        await self.docker("service", "update", "--force", f"{self.name}_{service}")

    async def kill(self, task: str) -> None:
        """Kills the task's service on the first node, which counts as a crash."""
        await self._engine.kill(await self._container(task))

    async def until_replaced(self, service: str, old: list[str], num: int = 1) -> list[str]:
        """Waits for ``num`` running tasks, without any ``old`` one; returns them."""
        async with asyncio.timeout(READY_S):
            while True:
                now = await self.tasks(service)
                if len(now) == num and not {*now} & {*old}:
                    return now
                await asyncio.sleep(0.3)

    async def until_whole(self) -> None:
        """Waits until every task runs and requests are answered."""
        async with asyncio.timeout(READY_S):
            while not (await self._has_all_tasks() and await self._is_ready()):
                await asyncio.sleep(0.3)

    async def until_all_work(self, service: str, num: int) -> None:
        """Waits until each of ``num`` tasks, all on the first node, has had work."""
        tasks = await self.tasks(service)
        assert len(tasks) == num
        await until_all_work(self._engine, [await self._container(each) for each in tasks])

    @asynccontextmanager
    async def joined(self, second: dict[str, str]) -> AsyncIterator[Node]:
        """With another engine as a node that runs tasks."""
        here = (await self.docker("info", "-f", "{{.Swarm.NodeAddr}}")).strip()
        token = (await self.docker("swarm", "join-token", "-q", "worker")).strip()
        other = Stack(second)
        join = ("swarm", "join", "--advertise-addr", "eth0", "--token", token)
        await other.docker(*join, f"{here}:2377")
        node = (await other.docker("info", "-f", "{{.Swarm.NodeID}}")).strip()
        try:
            yield Node(node, other)
        finally:
            await other.docker("swarm", "leave", "--force")
            await self.docker("node", "rm", "--force", node)

    async def tasks(self, service: str, node: str = "") -> list[str]:
        """The ids of running tasks, on a node or anywhere."""
        filters = ["--filter=desired-state=running", "--format={{.ID}} {{.CurrentState}}"]
        if node:
            filters.append(f"--filter=node={node}")
        listed = await self.docker("service", "ps", *filters, f"{self.name}_{service}")
        return [line.split()[0] for line in listed.splitlines() if line.split()[1] == "Running"]

    async def has_updated(self, service: str) -> bool:
        """True if the last update is complete. Fails if it was rolled back."""
        (found,) = json.loads(await self.docker("service", "inspect", f"{self.name}_{service}"))
        status: dict[str, Any] = found.get("UpdateStatus") or {}
        assert status.get("State", "updating") in {"updating", "completed"}, status
        return status.get("State") == "completed"

    async def remove(self) -> None:
        await self.docker("stack", "rm", self.name)
        label = f"label=com.docker.stack.namespace={self.name}"
        async with asyncio.timeout(90):
            while await self.docker("ps", "-aq", "--filter", label):
                await asyncio.sleep(0.3)

    async def _container(self, task: str) -> str:
        form = "{{.Status.ContainerStatus.ContainerID}}"
        return (await self.docker("inspect", "--type", "task", "-f", form, task)).strip()

    async def _has_all_tasks(self) -> bool:
        form = ("--format", "{{.Replicas}}")
        listed = (await self.docker("stack", "services", *form, self.name)).splitlines()
        pairs = [each.split()[0].split("/") for each in listed]
        return bool(pairs) and all(running == wanted for running, wanted in pairs)

    async def _is_ready(self) -> bool:
        with suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/ready") as got:
                return got.status == 200
        return False


@asynccontextmanager
async def running_swarm(engine: dict[str, str], folder: Path) -> AsyncIterator[Swarm]:
    """Built, deployed and serving; removed at the end, with the swarm if it was created here."""
    swarm = Swarm(engine, folder)
    await swarm.build()
    is_ours = (await swarm.docker("info", "-f", "{{.Swarm.LocalNodeState}}")).strip() == "inactive"
    if is_ours:
        await swarm.docker("swarm", "init", "--advertise-addr", "docker0")
    try:
        await swarm.deploy()
        await swarm.until_whole()
        yield swarm
    except BaseException:
        print(await state(swarm))
        raise
    finally:
        await swarm.remove()
        if is_ours:
            await swarm.docker("swarm", "leave", "--force")
            await swarm.docker("network", "rm", "docker_gwbridge")


async def until_all_work(engine: Stack, containers: list[str]) -> None:
    async with asyncio.timeout(READY_S):
        while not all([await _has_worked(engine, each) for each in containers]):
            await asyncio.sleep(0.3)


async def _has_worked(engine: Stack, container: str) -> bool:
    """Judged by answers for a gateway, by steps for other services."""
    served = await engine.metrics(container)
    answered = served.get('shoal_http_requests_total{route="/v1/completions",status="200"}', 0)
    return bool(answered or (await engine.status(container))["num_steps"])


async def state(swarm: Swarm) -> str:
    """All tasks, with their errors, and the ends of the services' logs."""
    parts = [await swarm.docker("stack", "ps", "--no-trunc", swarm.name)]
    for service in ("edge", *SERVICES):
        with suppress(CommandError):
            logs = ("service", "logs", "--tail", "20", f"{swarm.name}_{service}")
            parts.append(await swarm.docker(*logs))
    return "\n".join(parts)
