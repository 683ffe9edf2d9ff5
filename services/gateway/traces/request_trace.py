"""The trace of one request: the gateway's own spans and the reports of other services."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from msgspec.structs import replace

from services.gateway.mesh.observer import Attributes, RequestObserver
from services.gateway.traces.context import TraceContext
from shared.process.metrics import SPANS_DROPPED
from shared.wire.messages import MAX_NAME_CHARS, MAX_SPANS, Span, SpanReport
from shared.wire.spans import unix_s

MAX_REPORTED = 4000
"""Spans of a trace: enough for 16 prompts with 16 choices each, and some replays."""
MAX_ATTEMPTS = MAX_SPANS - 16  # the rest is for a gateway's other spans
SHOWN_S = 0.001


class Measured:
    """A context manager that appends itself to ``spans`` on exit."""

    __slots__ = ("_spans", "attributes", "ended_s", "name", "started_s")

    def __init__(self, name: str, spans: "list[Measured]") -> None:
        self.name = name
        self.started_s = self.ended_s = 0.0
        self.attributes: Attributes = {}
        self._spans = spans

    def __enter__(self) -> Attributes:
        self.started_s = time.monotonic()
        return self.attributes

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.ended_s = time.monotonic()
        self._spans.append(self)


@dataclass(slots=True)
class Attempt:
    """A prompt at a tokenizer. ``lost`` is the lost service, empty if none was lost."""

    prompt: int
    number: int
    tokenizer: str
    started_s: float
    ended_s: float = 0.0
    lost: str = ""
    name: str = "attempt"

    @property
    def attributes(self) -> Attributes:
        shown: Attributes = {
            "prompt": self.prompt,
            "attempt": self.number,
            "tokenizer": self.tokenizer,
        }
        return shown | {"lost": self.lost[:MAX_NAME_CHARS]} if self.lost else shown


class RequestTrace(RequestObserver):
    """A trace from the start of a request. ``name`` is its name in the mesh, empty before
    ``on_begin``, which returns True if the request is traced. ``ids`` are known to the client.
    Times are monotonic."""

    def __init__(
        self,
        context: TraceContext,
        route: str,
        on_begin: Callable[["RequestTrace", str], bool],
    ) -> None:
        self._on_begin = on_begin
        self.context = context
        self.route = route
        self.started_s = time.monotonic()
        self.name = ""
        self.ids: set[str] = set()
        self.owner = ""
        self.attributes: Attributes = {}
        self.attempts: list[Attempt] = []
        self.reports: list[SpanReport] = []
        self._num_reported = 0
        self._spans: list[Measured] = []

    def note_ids(self, ids: set[str]) -> None:
        self.ids = ids

    def begin(self, name: str) -> None:
        self.is_traced = self._on_begin(self, name)

    def measure(self, step: str) -> Measured:
        return Measured(step, self._spans)

    def begin_attempt(self, prompt: int, number: int, tokenizer: str, now_s: float) -> None:
        if self.is_traced and len(self.attempts) < MAX_ATTEMPTS:
            self.attempts.append(Attempt(prompt, number, tokenizer, now_s))

    def end_attempt(self, prompt: int, number: int, lost: str, now_s: float) -> None:
        for each in reversed(self.attempts):
            if (each.prompt, each.number) == (prompt, number) and not each.ended_s:
                each.ended_s, each.lost = now_s, lost
                return

    def place(self, report: SpanReport, now_s: float) -> SpanReport | None:
        """A report of another service, received at ``now_s`` of our clock; None if the trace is
        full.

        The report must lie between the start of its attempt and now. If its host's clock differs,
        all of it is shifted by the smallest sufficient time.
        """
        if not report.spans or self._num_reported + len(report.spans) > MAX_REPORTED:
            SPANS_DROPPED.inc(len(report.spans))
            return None
        self._num_reported += len(report.spans)
        shift_s = self._shift_s(report, unix_s(now_s))
        if not shift_s:
            return report
        shown = {"clock_shift_ms": round(1000 * shift_s, 3)} if abs(shift_s) >= SHOWN_S else {}
        spans = [replace(span, start_s=max(0.0, span.start_s + shift_s)) for span in report.spans]
        spans[0] = replace(spans[0], attributes=spans[0].attributes | shown)
        return replace(report, spans=spans)

    def own_report(self, instance: str, now_s: float) -> SpanReport:
        """The gateway's spans, once; the first is the whole request."""
        offset_s = unix_s(0.0)
        start_s, name = offset_s + self.started_s, f"POST {self.route}"
        spans = [Span(name, start_s, now_s - self.started_s, 0, self.attributes)]
        parts: list[Measured | Attempt] = [*self._spans, *self.attempts]
        for each in parts:
            duration_s = (each.ended_s or now_s) - each.started_s
            start_s = offset_s + each.started_s
            spans.append(Span(each.name, start_s, duration_s, 1, each.attributes))
        self._spans.clear()
        return SpanReport(self.name, 0, "gateway", instance, spans)

    def _shift_s(self, report: SpanReport, last_s: float) -> float:
        start_s = min(span.start_s for span in report.spans)
        end_s = max(span.start_s + span.duration_s for span in report.spans)
        shift_s = min(0.0, last_s - end_s)
        first_s = self._sent_s(report)
        if first_s is not None and start_s + shift_s < first_s:
            shift_s = first_s - start_s
        return shift_s

    def _sent_s(self, report: SpanReport) -> float | None:
        """The start of the report's attempt in unix time."""
        _, prompt = request_and_prompt(report)
        for each in self.attempts:
            if str(each.prompt) == prompt and each.number == report.attempt:
                return unix_s(each.started_s)
        return None


def request_and_prompt(report: SpanReport) -> tuple[str, str]:
    """The name of the request and the number of the prompt of a report. Tokenizers report prompts,
    other services choices."""
    name = report.request
    prompt = name if report.service == "tokenizer" else name.rpartition("/")[0]
    request, _, number = prompt.rpartition("/")
    return request, number
