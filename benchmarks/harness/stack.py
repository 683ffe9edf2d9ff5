"""The stack of docker-compose.yml, built from this checkout, under a unique name."""

import asyncio
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.docker_engine import (
    ROOT,
    NoEngine,
    provide_base_images,
    running_engine,
)
from benchmarks.harness.ports import free_port

READY_S = 120
FILES = ("docker-compose.yml", "benchmarks/harness/override.yml")


class CommandError(Exception):
    """A command failed; the message holds its output."""


@dataclass
class Stack:
    """``docker compose`` with the stack's name, files and ports."""

    environment: dict[str, str]
    name: str = field(default_factory=lambda: f"shoal-test-{secrets.token_hex(3)}")
    port: int = field(default_factory=free_port)
    prometheus_port: int = field(default_factory=free_port)
    files: list[str] = field(default_factory=lambda: list(FILES))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def _settings(self) -> dict[str, str]:
        return {
            "SHOAL_TAG": "test",
            "SHOAL_PUBLISH": f"127.0.0.1:{self.port}",
            "PROMETHEUS_PUBLISH": str(self.prometheus_port),
        }

    async def docker(self, *arguments: str) -> str:
        """The command's output. Raises CommandError."""
        process = await asyncio.create_subprocess_exec(
            *("docker", *arguments),
            env=self.environment | self._settings,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise CommandError(
                f"docker {' '.join(arguments)}: {output[-800:]!r} {errors[-2000:]!r}"
            )
        return output.decode()

    async def compose(self, *arguments: str) -> str:
        files = [f"--file={file}" for file in self.files]
        return await self.docker("compose", "-p", self.name, *files, *arguments)

    async def build(self) -> None:
        """Builds all images; unchanged layers come from the engine's cache."""
        await self.compose("--profile", "observability", "build")

    @asynccontextmanager
    async def extended(
        self, files: dict[str, list[str]], settings: dict[str, str]
    ) -> AsyncIterator[None]:
        """Adds files to the named services, and the settings for them."""
        before = self.files
        self.files = before + [file for each in files.values() for file in each]
        self.environment |= settings
        await self.compose("up", "-d", "--no-build", "--wait", *files)
        try:
            yield
        finally:
            self.files = before
            await self.compose("up", "-d", "--no-build", "--wait", *files)

    async def scale(self, **nums: int) -> None:
        """Runs the README's command and waits until all replicas are ready."""
        flags = [f"--scale={service}={num}" for service, num in nums.items()]
        await self.compose("up", "-d", "--no-build", *flags)

    async def begin_replacement(self, service: str) -> list[str]:
        """The first command of docs/operate.md: starts new containers next to the old ones, returns
        the old ids, and waits until the new ones are healthy."""
        old = await self.containers(service)
        grow = ("--no-recreate", "--no-build", "--wait", f"--scale={service}={2 * len(old)}")
        await self.compose("up", "-d", *grow, service)
        return old

    async def end_replacement(self, old: list[str]) -> None:
        """The second command: stops the old containers one after another."""
        for container in old:
            await self.docker("stop", container)
            await self.docker("rm", container)

    async def containers(self, service: str) -> list[str]:
        """The ids of running containers."""
        return (await self.compose("ps", "-q", service)).split()

    async def status(self, container: str) -> dict[str, Any]:
        """The status of the container's service."""
        answer: dict[str, object] = json.loads(
            await self.docker("exec", container, "shoal", "probe", "/status")
        )
        return answer

    async def metrics(self, container: str) -> dict[str, float]:
        text = await self.docker("exec", container, "shoal", "probe", "/metrics")
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    async def kill(self, container: str) -> None:
        """Kills the container, which counts as a crash."""
        os.kill(await self.pid(container), signal.SIGKILL)

    async def pid(self, container: str) -> int:
        """The service's process id on the host."""
        init = await self.docker("inspect", "-f", "{{.State.Pid}}", container)
        children = Path(f"/proc/{init.strip()}/task/{init.strip()}/children").read_text()
        (pid,) = map(int, children.split())
        return pid

    async def until_restarted(self, container: str, times: int = 1) -> None:
        async with asyncio.timeout(READY_S):
            while True:
                count = await self.docker("inspect", "-f", "{{.RestartCount}}", container)
                if int(count) >= times:
                    return
                await asyncio.sleep(0.2)

    async def until_ready(self, service: str, num: int) -> None:
        """Waits until ``num`` containers of ``service`` exist and each is ready."""
        async with asyncio.timeout(READY_S):
            while True:
                found = await self.containers(service)
                states = await asyncio.gather(*map(self.status, found), return_exceptions=True)
                ready = [s for s in states if isinstance(s, dict) and s["state"] == "ready"]
                if len(ready) == len(found) == num:
                    return
                await asyncio.sleep(0.2)

    async def leftovers(self) -> str:
        """Containers, volumes and networks with the stack's name."""
        label = f"label=com.docker.compose.project={self.name}"
        commands = (("ps", "-aq"), ("volume", "ls", "-q"), ("network", "ls", "-q"))
        return "".join([await self.docker(*each, "--filter", label) for each in commands])


@asynccontextmanager
async def running_stack(
    environment: dict[str, str], files: Sequence[str] = FILES
) -> AsyncIterator[Stack]:
    """Built, up and ready; removed at the end with everything it created."""
    stack = Stack(environment, files=[*files])
    await stack.build()
    try:
        await stack.compose("up", "-d", "--wait")
        yield stack
    except BaseException:
        print(await stack.compose("logs", "--tail", "50"))
        raise
    finally:
        await stack.compose("--profile", "*", "down", "--volumes", "--timeout", "1")


def main() -> None:
    """Builds the images beforehand, if an engine can run."""
    try:
        with running_engine() as environment:
            provide_base_images(environment)
            asyncio.run(Stack(environment).build())
    except NoEngine as reason:
        print(reason)


if __name__ == "__main__":
    main()
