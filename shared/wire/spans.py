"""Buffers spans for the next message to a gateway."""

import time

from shared.process.metrics import SPANS_DROPPED
from shared.wire.messages import SpanReport

MAX_MESSAGE_SPANS = 2048
"""Some 500 KiB of a header of at most 4 MiB."""


def unix_s(monotonic_s: float) -> float:
    """Converts a time of this process's monotonic clock to unix time, by the present difference of
    the clocks."""
    return time.time() - time.monotonic() + monotonic_s


class SpanBuffer:
    """Reports for the next message. Reports beyond its limit are dropped and counted."""

    def __init__(self) -> None:
        self._reports: list[SpanReport] = []
        self._num_spans = 0

    def __bool__(self) -> bool:
        return bool(self._reports)

    def add(self, report: SpanReport) -> None:
        if self._num_spans + len(report.spans) > MAX_MESSAGE_SPANS:
            SPANS_DROPPED.inc(len(report.spans))
            return
        self._reports.append(report)
        self._num_spans += len(report.spans)

    def take(self) -> list[SpanReport]:
        reports, self._reports = self._reports, []
        self._num_spans = 0
        return reports
