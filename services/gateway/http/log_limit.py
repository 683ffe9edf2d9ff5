"""Keeps clients from filling the log."""

import logging
import time

MAX_LINES = 20
WINDOW_S = 10.0


class LogLimit(logging.Filter):
    """Lets ``MAX_LINES`` of a logger pass in ``WINDOW_S``. The first line of a later window
    states how many were left out before it."""

    def __init__(self) -> None:
        super().__init__()
        self._ends_s = 0.0
        self._num_lines = 0

    def filter(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        if now_s >= self._ends_s:
            self._count_left_out(record)
            self._ends_s, self._num_lines = now_s + WINDOW_S, 0
        self._num_lines += 1
        return self._num_lines <= MAX_LINES

    def _count_left_out(self, record: logging.LogRecord) -> None:
        num_left_out = self._num_lines - MAX_LINES
        if num_left_out > 0:
            record.msg = f"{record.msg} ({num_left_out} lines like this were left out before)"
