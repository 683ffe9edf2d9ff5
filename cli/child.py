"""One supervised process at a time for one replica of a service."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from shared.address import admin_path
from shared.config_sources import SUPERVISOR_FD
from shared.messages import ServiceName

ASK_TIMEOUT = aiohttp.ClientTimeout(total=1)
MAX_LINE_BYTES = 64 << 10
MAX_LAST_LINES = 50


class Child:
    """A service's process. It dies with us: it watches the read end of a pipe we hold."""

    def __init__(self, service: ServiceName, instance: str, directory: Path) -> None:
        self.service = service
        self.instance = instance
        self.was_ready = False
        self.status: dict[str, Any] = {"state": "starting", "reason": ""}
        self._last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._ended = asyncio.Event()
        self._process: Process | None = None
        self._signal: signal.Signals | None = None
        self._admin = admin_path(directory, service, instance)

    def __str__(self) -> str:
        return f"{self.service} {self.instance}"

    @property
    def last_words(self) -> str:
        """The error it ended with, to its last line; of one that says none the last line."""
        lines = list(self._last_lines)
        starts = [n for n, line in enumerate(lines) if line.startswith(f"shoal {self.service}: ")]
        return "\n".join(lines[starts[-1] if starts else -1 :])

    async def run(self, environment: dict[str, str], on_line: Callable[[str], None]) -> int:
        """Starts the process and returns its exit code; ``on_line`` gets what it prints. The
        process is gone when this ends, also where it is cancelled."""
        read_end, write_end = os.pipe()
        try:
            self._process = await self._start(
                environment | {SUPERVISOR_FD: str(read_end)}, read_end
            )
            os.close(read_end)
            if self._signal is not None:
                self._process.send_signal(self._signal)
            await self._read_lines(self._process, on_line)
            code = await self._process.wait()
            self.status = {"state": "ended", "reason": exit_text(code)}
            return code
        finally:
            os.close(write_end)
            if self._process is not None and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()
            self._ended.set()

    def signal(self, number: signal.Signals) -> None:
        """Also reaches a process that is only being started."""
        self._signal = number
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def wait(self) -> None:
        await self._ended.wait()

    async def ask_status(self) -> None:
        """Refreshes ``status`` from the admin port; without an answer the last one stays."""
        connector = aiohttp.UnixConnector(str(self._admin))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=ASK_TIMEOUT) as session,
                session.get("http://admin/status") as response,
            ):
                status = await response.json()
        except (aiohttp.ClientError, TimeoutError):
            return
        if not self._ended.is_set():
            self.status = status
            self.was_ready = self.was_ready or status["state"] == "ready"

    async def _start(self, environment: dict[str, str], inherited: int) -> Process:
        """``-P``: the directory we were started in is no place to import from."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", f"services.{self.service}"),
            env=environment,
            pass_fds=(inherited,),
            start_new_session=True,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
        )

    async def _read_lines(self, process: Process, on_line: Callable[[str], None]) -> None:
        """Until the process closes its output; lines without an end are cut."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(MAX_LINE_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._take(lines, on_line)
        self._take([rest] if rest else [], on_line)

    def _take(self, lines: list[bytes], on_line: Callable[[str], None]) -> None:
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            on_line(text)


def exit_text(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
