"""Spans on their way to a gateway, with the next message that goes there."""

import time

from shared.process.metrics import SPANS_DROPPED
from shared.wire.messages import SpanReport

MAX_MESSAGE_SPANS = 2048
"""Some 500 KiB of the 4 MiB that the header of a message may have."""


def unix_s(monotonic_s: float) -> float:
    """A time of this process's monotonic clock as unix time, by what the clocks show now."""
    return time.time() - time.monotonic() + monotonic_s


class SpanBuffer:
    """Keeps reports for the next message. What is too much for one is dropped, and counted."""

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
