"""The spans of prompts: the steps of preparing one, and its decoding as one."""

import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from services.tokenizer.observer import UNOBSERVED, Attributes, Observer, PromptObserver
from shared.link.peer import Peer
from shared.wire.envelope import RequestOptions
from shared.wire.messages import Span, SpanReport, Submit
from shared.wire.spans import unix_s

MAX_ENDED = 4096
"""Prompts that have ended, but about which a scheduler or worker may still have to report."""

Key = tuple[str, int]  # request, attempt
Reports = list[tuple[Peer, SpanReport]]


class Prompts(Observer):
    """Follows the prompts that are traced, and passes reports about them on."""

    def __init__(self, instance: str = "") -> None:
        self._instance = instance
        self._open: dict[Key, Peer] = {}  # their gateways
        self._ended: OrderedDict[Key, Peer] = OrderedDict()
        self._reports: Reports = []

    def begin(self, submit: Submit, options: RequestOptions, gateway: Peer) -> PromptObserver:
        if not options.is_traced:
            return UNOBSERVED
        self._open[submit.request, submit.attempt] = gateway
        return PromptSpans(submit, self)

    def forward(self, report: SpanReport) -> None:
        """One about a sequence of a prompt that is not known is dropped."""
        key = report.request.rpartition("/")[0], report.attempt
        if (gateway := self._open.get(key, self._ended.get(key))) is not None:
            self._reports.append((gateway, report))

    def take_reports(self) -> Reports:
        reports, self._reports = self._reports, []
        return reports

    def end(self, request: str, attempt: int, spans: list[Span]) -> None:
        key = request, attempt
        gateway = self._ended[key] = self._open.pop(key)
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        report = SpanReport(*key, "tokenizer", self._instance, spans)
        self._reports.append((gateway, report))


class PromptSpans(PromptObserver):
    """The spans of one prompt, from now on."""

    def __init__(self, submit: Submit, prompts: Prompts) -> None:
        self._submit = submit
        self._prompts = prompts
        self._begun_s = time.monotonic()
        self._spans: list[Span] = []
        self._decodes_s: float | None = None
        self._num_deliveries = 0

    @contextmanager
    def measure(self, step: str) -> Iterator[Attributes]:
        started_s = time.monotonic()
        attributes: Attributes = {}
        try:
            yield attributes
        finally:
            self._add(step, started_s, attributes)

    def note_thread(self) -> None:
        self._add("queue", self._begun_s, {"reason": "threads"})

    def note_tokens(self) -> None:
        if self._decodes_s is None:
            self._decodes_s = time.monotonic()
        self._num_deliveries += 1

    def end(self, reason: str, num_prompt_tokens: int) -> None:
        submit = self._submit
        if self._decodes_s is not None:
            self._add("decode", self._decodes_s, {"num_deliveries": self._num_deliveries})
        attributes: Attributes = {
            "reason": reason,
            "attempt": submit.attempt,
            "kind": submit.kind,
            "num_prompt_tokens": num_prompt_tokens,
        }
        num_resumed = sum(start.num_ids for start in submit.choices)
        if num_resumed:
            attributes["num_resumed_tokens"] = num_resumed
        duration_s = time.monotonic() - self._begun_s
        whole = Span("prompt", unix_s(self._begun_s), duration_s, 0, attributes)
        self._prompts.end(submit.request, submit.attempt, [whole, *self._spans])

    def _add(self, name: str, started_s: float, attributes: Attributes) -> None:
        duration_s = time.monotonic() - started_s
        self._spans.append(Span(name, unix_s(started_s), duration_s, 1, attributes))
