"""Keeps one process per replica alive, and ends them in order."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

from cli.child import Child
from cli.run_directory import RunDirectory
from shared.config import ServeConfig
from shared.errors import ShoalError
from shared.messages import ServiceName

SERVICES: tuple[ServiceName, ...] = ("gateway", "tokenizer", "scheduler", "worker")
MAX_FAILED_STARTS = 3
WRONG_SETTING = 2
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
POLL_S = 0.2
KILL_AFTER_S = 5.0


class StartFailedError(ShoalError):
    """A service cannot be started; the text holds its last words."""


class Supervisor:
    """Starts every service at once, restarts what dies, and drains from the gateway down."""

    def __init__(
        self, config: ServeConfig, directory: RunDirectory, on_line: Callable[[str], None]
    ) -> None:
        self._config = config
        self._directory = directory
        self._on_line = on_line
        self._environment = child_environment(config)
        self._is_stopping = False
        self.children: dict[str, Child] = {}  # by replica

    async def run(self, on_change: Callable[[], None]) -> None:
        """Until ``stop``. Raises StartFailedError for a service that never becomes ready."""
        async with asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(self._poll(on_change))
            replicas = [tasks.create_task(self._keep_alive(service)) for service in SERVICES]
            await asyncio.wait(replicas)
            polling.cancel()

    async def stop(self) -> None:
        """Gateways first: they end what is open while everything below still runs."""
        self._is_stopping = True
        for service in SERVICES:
            children = [child for child in self.children.values() if child.service == service]
            for child in children:
                child.signal(signal.SIGTERM)
            await self._wait_or_kill(children)

    def kill(self) -> None:
        self._is_stopping = True
        for child in self.children.values():
            child.signal(signal.SIGKILL)

    async def _wait_or_kill(self, children: list[Child]) -> None:
        waits = [asyncio.create_task(child.wait()) for child in children]
        _, late = await asyncio.wait(waits, timeout=self._config.drain_timeout_s + KILL_AFTER_S)
        if late:
            for child in children:
                child.signal(signal.SIGKILL)

    async def _keep_alive(self, service: ServiceName) -> None:
        replica = f"{service}-0"
        num_starts = num_failed = 0
        while not self._is_stopping:
            num_starts += 1
            child = Child(service, f"{replica}.{num_starts}", self._directory.path)
            self.children[replica] = child
            code = await child.run(self._environment_of(child), self._on_line)
            self._directory.sweep(child.instance)
            child.status = {"state": "ended", "reason": f"exit code {code}"}
            if self._is_stopping:
                return
            num_failed = 0 if child.was_ready else num_failed + 1
            if code == WRONG_SETTING or num_failed == MAX_FAILED_STARTS:
                raise StartFailedError(child.last_line or f"{service} ended with code {code}")
            backoff_s = min(FIRST_BACKOFF_S * 2**num_failed, MAX_BACKOFF_S)
            self._on_line(f"{child.instance} ended with code {code}; again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)

    def _environment_of(self, child: Child) -> dict[str, str]:
        return self._environment | {
            "SHOAL_MESH_DIR": str(self._directory.path),
            "SHOAL_INSTANCE": child.instance,
        }

    async def _poll(self, on_change: Callable[[], None]) -> None:
        while True:
            await asyncio.gather(*(child.ask_status() for child in self.children.values()))
            on_change()
            await asyncio.sleep(POLL_S)


def child_environment(config: ServeConfig) -> dict[str, str]:
    """Our environment with every setting that was given, wherever, as ``SHOAL_…``."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment.pop("SHOAL_CONFIG", None)
    environment.pop("SHOAL_ADMIN_PORT", None)
    for name in config.model_fields_set - {"config", "admin_port"}:
        environment[f"SHOAL_{name.upper()}"] = _as_text(getattr(config, name))
    return environment


def _as_text(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)
