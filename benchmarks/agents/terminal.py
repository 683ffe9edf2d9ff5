"""An interactive program in a terminal of its own, with prompts typed into it."""

import asyncio
import fcntl
import os
import pty
import signal
import struct
import termios
from collections.abc import Callable
from pathlib import Path

ROWS, COLUMNS = 40, 140
POLL_S = 0.2
SETTLE_S = 2.0
"""From the last output of a reply until the program takes the next prompt."""
CHUNK_BYTES = 65536


class Terminal:
    """Runs ``command`` and discards its output."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._pid, self._file = pty.fork()
        if not self._pid:
            os.chdir(folder)
            os.execve(command[0], command, environment)
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        os.set_blocking(self._file, False)

    async def type_line(self, text: str) -> None:
        """The line's end comes later: together with the text it would be a pasted line."""
        os.write(self._file, text.encode())
        await self.settle()
        os.write(self._file, b"\r")

    async def settle(self) -> None:
        """Waits until there was no output for a while."""
        quiet_s = 0.0
        while quiet_s < SETTLE_S:
            await asyncio.sleep(POLL_S)
            quiet_s = 0.0 if self._has_output() else quiet_s + POLL_S

    async def until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self._has_output()
            await asyncio.sleep(POLL_S)

    def end(self) -> None:
        os.kill(self._pid, signal.SIGTERM)
        os.close(self._file)
        os.waitpid(self._pid, 0)

    def _has_output(self) -> bool:
        try:
            return bool(os.read(self._file, CHUNK_BYTES))
        except BlockingIOError:
            return False
