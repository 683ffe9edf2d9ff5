"""One supervised process at a time for one replica of a service."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from shared.address import admin_path
from shared.messages import ServiceName
from shared.service import SUPERVISOR_FD

ASK_TIMEOUT = aiohttp.ClientTimeout(total=1)


class Child:
    """A service's process. It dies with us: it watches the read end of a pipe we hold."""

    def __init__(self, service: ServiceName, instance: str, directory: Path) -> None:
        self.service = service
        self.instance = instance
        self.was_ready = False
        self.status: dict[str, Any] = {"state": "starting", "reason": ""}
        self.last_line = ""
        self.process: Process | None = None
        self._admin = admin_path(directory, service, instance)

    async def run(self, environment: dict[str, str], on_line: Callable[[str], None]) -> int:
        """Starts the process and returns its exit code; ``on_line`` gets what it prints."""
        read_end, write_end = os.pipe()
        try:
            process = self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", f"services.{self.service}"),
                env=environment | {SUPERVISOR_FD: str(read_end)},
                pass_fds=(read_end,),
                start_new_session=True,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
            )
            os.close(read_end)
            await self._read_lines(process, on_line)
            return await process.wait()
        finally:
            os.close(write_end)

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def ask_status(self) -> None:
        """Refreshes ``status`` from the admin port; a process that does not answer keeps the
        last."""
        connector = aiohttp.UnixConnector(str(self._admin))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=ASK_TIMEOUT) as session,
                session.get("http://admin/status") as response,
            ):
                self.status = await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return
        self.was_ready = self.was_ready or self.status["state"] == "ready"

    async def wait(self) -> None:
        if self.process is not None:
            await self.process.wait()

    async def _read_lines(self, process: Process, on_line: Callable[[str], None]) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.last_line = line.decode(errors="replace").rstrip()
            on_line(self.last_line)
