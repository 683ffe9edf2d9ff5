"""The check that a client reads its response."""

STEP_BYTES = 64 << 10
"""Fewer bytes in a period are too few, so that an occasional byte does not keep a connection."""


class ReadingCheck:
    """A client is late if within ``period_s`` it reads neither all of the sent bytes nor
    ``STEP_BYTES`` of them. Pure; times are monotonic."""

    def __init__(self, period_s: float) -> None:
        self.period_s = period_s
        self._began_s: float | None = None
        self._read_before = 0

    def is_late(self, num_written: int, num_unread: int, now_s: float) -> bool:
        """``num_written`` counts all bytes since the connection began."""
        num_read = num_written - num_unread
        if num_unread == 0:
            self._began_s = None
        elif self._began_s is None or num_read - self._read_before >= STEP_BYTES:
            self._began_s, self._read_before = now_s, num_read
        return self._began_s is not None and now_s - self._began_s >= self.period_s
