"""One supervised process at a time, for one replica of a service."""

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from cli.exit_codes import FAILED
from shared.link.address import admin_path
from shared.settings.environment import SUPERVISOR_FD
from shared.wire.messages import ServiceName

ASK_S = 1.0
MAX_LINE_BYTES = 64 << 10
MAX_LAST_LINES = 50
STARVED = 3 / 4  # of the time without a processor
OWN_LIMITS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


class Child:
    """A service's process, connected by a socket pair: the process writes a byte when it is ready,
    and exits when our end closes, which happens if we die.

    ``num_unanswered`` counts consecutive unanswered requests of one second each; during the start
    only if the process listens, and none for which the machine had no processor time.
    ``end_text`` describes its end.
    """

    def __init__(self, service: ServiceName, instance: str, directory: Path) -> None:
        self.service = service
        self.instance = instance
        self.was_ready = False
        self.num_unanswered = 0
        self.status: dict[str, Any] = {"state": "starting", "reason": ""}
        self.end_text = ""
        self._last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._ended = asyncio.Event()
        self._process: Process | None = None
        self._signal: signal.Signals | None = None
        self._admin = admin_path(directory, service, instance)
        self._session: aiohttp.ClientSession | None = None

    def __str__(self) -> str:
        return f"{self.service} {self.instance}"

    @property
    def last_words(self) -> str:
        """The lines of its final error; without a logged error, its last line."""
        lines = list(self._last_lines)
        starts = [n for n, line in enumerate(lines) if line.startswith(f"shoal {self.service}: ")]
        return "\n".join(lines[starts[-1] if starts else -1 :])

    async def run(self, environment: dict[str, str], on_line: Callable[[str], None]) -> int:
        """Starts the process and returns its exit code, or ``FAILED`` if it cannot be started;
        ``on_line`` gets its output. The process has ended when this returns or is cancelled."""
        try:
            code = await self._run(environment, on_line)
            self._note_end(f"ended with {exit_text(code)}", exit_text(code))
        except OSError as error:  # for example a limit of files, processes or memory
            code, reason = FAILED, os.strerror(error.errno) if error.errno else str(error)
            self._last_lines.append(f"shoal {self.service}: cannot be started: {reason}")
            self._note_end(f"cannot be started: {reason}", reason)
        finally:
            self._ended.set()
        return code

    async def _run(self, environment: dict[str, str], on_line: Callable[[str], None]) -> int:
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(self._admin)),
            timeout=aiohttp.ClientTimeout(total=ASK_S),
        )
        try:
            with theirs:
                extra = {SUPERVISOR_FD: str(theirs.fileno())}
                self._process = await self._start(environment | extra, theirs.fileno())
            if self._signal is not None:
                _send(self._process, self._signal)
            await self._read_lines(self._process, on_line)
            code = await self._process.wait()
            self._read_ready()
            return code
        finally:
            if self._process is not None and self._is_running:
                _send(self._process, signal.SIGKILL)
                await self._process.wait()
            self._ours.close()  # a request in flight may still be answered
            await self._session.close()

    def _note_end(self, text: str, reason: str) -> None:
        self.end_text, self.status = text, {"state": "ended", "reason": reason}

    def signal(self, number: signal.Signals) -> None:
        """Also reaches a process that is being started."""
        self._signal = number
        if self._process is not None and self._is_running:
            _send(self._process, number)

    async def wait(self) -> None:
        await self._ended.wait()

    async def ask_status(self) -> None:
        """Refreshes ``status`` from the admin port of a running process."""
        if self._session is None or not self._is_running:
            return
        self._read_ready()
        status = self.status
        assert self._process is not None
        share = _ProcessorShare(self._process.pid)
        try:
            async with self._session.get("http://admin/status") as response:
                status = await response.json()
            self.num_unanswered = 0
        except TimeoutError:
            self.num_unanswered += not share.is_starved()
            status = {**status, "state": "unresponsive", "reason": "it does not answer"}
        except aiohttp.ClientError as error:  # it does not listen yet, or no longer
            if not _is_own_limit(error):
                self.num_unanswered += self.was_ready
        if self._is_running:
            self.status = status

    @property
    def _is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def _read_ready(self) -> None:
        """Waits for the byte of a ready process."""
        with suppress(BlockingIOError):
            self.was_ready = self.was_ready or self._ours.recv(1) != b""

    async def _start(self, environment: dict[str, str], inherited: int) -> Process:
        """``-P`` excludes the working directory from imports. Raises OSError."""
        try:
            return await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", f"services.{self.service}"),
                env=environment,
                pass_fds=(inherited,),
                start_new_session=True,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=STDOUT,
            )
        # No thread available, by which Python 3.11 waits for a process.
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error

    async def _read_lines(self, process: Process, on_line: Callable[[str], None]) -> None:
        """Reads until the process closes its output; cuts long lines into several."""
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


class _ProcessorShare:
    """The use of processors by another process and by this one, from now on."""

    def __init__(self, pid: int) -> None:
        self._pid, self._began_ns = pid, time.monotonic_ns()
        (self._ran_ns, _), (_, self._waited_ns) = _ran_and_waited(pid), _ran_and_waited(os.getpid())

    def is_starved(self) -> bool:
        """True if one of them was ready most of the time and had no processor. Linux counts a wait
        when it has ended: the other process may wait still."""
        elapsed_ns = time.monotonic_ns() - self._began_ns
        (ran_ns, _), (_, waited_ns) = _ran_and_waited(self._pid), _ran_and_waited(os.getpid())
        if waited_ns - self._waited_ns > STARVED * elapsed_ns:
            return True
        most_ns = self._ran_ns + (1 - STARVED) * elapsed_ns
        return 0 < ran_ns < most_ns and _is_ready(self._pid)


def _ran_and_waited(pid: int) -> tuple[int, int]:
    """Nanoseconds of the main thread on a processor, and ready without one; 0 if unknown."""
    try:
        ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return 0, 0
    return int(ran), int(waited)


def _is_ready(pid: int) -> bool:
    """True if the main thread runs or waits for a processor."""
    try:
        return ") R " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _send(process: Process, number: signal.Signals) -> None:
    """Unlike the method of the process this never reaps it, which would lose the exit code."""
    with suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _is_own_limit(error: aiohttp.ClientError) -> bool:
    """True if the request was not sent, for lack of descriptors or memory in this process."""
    return isinstance(error, OSError) and error.errno in OWN_LIMITS


def exit_text(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    has_name = -code in {*signal.Signals}  # those between SIGRTMIN and SIGRTMAX have none
    return signal.Signals(-code).name if has_name else f"signal {-code}"
