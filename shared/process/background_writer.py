"""Writes text in a thread of its own, so that a slow or absent reader does not block the caller."""

import io
import os
import threading
from collections import deque
from collections.abc import Callable
from select import select

from shared.process.metrics import LINES_DROPPED

MAX_WAITING_BYTES = 1 << 20
ENTRY_BYTES = 100  # overhead of one text besides its bytes


class BackgroundWriter(io.TextIOBase):
    """A text stream to ``descriptor``. ``write`` never blocks and never raises: a text without
    room, or with a failed write, is dropped and counted. ``on_dropped`` gets the count when the
    queue is empty."""

    def __init__(self, descriptor: int, on_dropped: Callable[[int], None]) -> None:
        self._descriptor = descriptor
        self._on_dropped = on_dropped
        self._waiting: deque[bytes] = deque()  # the first is being written
        self._num_bytes = 0
        self._num_dropped = 0
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="output", daemon=True).start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, text: str) -> int:
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._num_bytes + len(data) > MAX_WAITING_BYTES:
                self._count_dropped()
            else:
                self._waiting.append(data)
                self._num_bytes += len(data) + ENTRY_BYTES
                self._changed.notify_all()
        return len(text)

    def wait_written(self, timeout_s: float) -> None:
        """Returns when everything is written, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def close(self) -> None:
        """Queued texts are still written; ``descriptor`` stays open."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (data := self._next()) is not None:
            is_written = self._try_write(data)
            with self._changed:
                self._waiting.popleft()
                self._num_bytes -= len(data) + ENTRY_BYTES
                if not is_written:
                    self._count_dropped()
                num_dropped = self._num_dropped if is_written and not self._waiting else 0
                self._num_dropped -= num_dropped
                self._changed.notify_all()
            if num_dropped:
                self._on_dropped(num_dropped)

    def _count_dropped(self) -> None:
        self._num_dropped += 1
        LINES_DROPPED.inc()

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting[0] if self._waiting else None

    def _try_write(self, data: bytes) -> bool:
        rest = memoryview(data)
        try:
            while rest:
                select([], [self._descriptor], [])  # another process may have made it non-blocking
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:  # no space, no reader, …
            return False
        return True
