"""The spans of prompts: what preparing one took, and its decoding as one."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shared.wire.messages import Span, SpanReport, SpanValue, Submit
from shared.wire.spans import unix_s

Attributes = dict[str, SpanValue]
Measure = Callable[[str], AbstractContextManager[Attributes]]


def unmeasured(name: str) -> AbstractContextManager[Attributes]:
    """Measures nothing."""
    return nullcontext({})


class PromptSpans:
    """Those of one prompt, from now on."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._begun_s = time.monotonic()
        self._spans: list[Span] = []
        self._decodes_s: float | None = None
        self._num_deliveries = 0

    @contextmanager
    def measure(self, name: str) -> Iterator[Attributes]:
        """Measures what happens in the context, whose attributes it may add; on any thread."""
        started_s = time.monotonic()
        attributes: Attributes = {}
        try:
            yield attributes
        finally:
            self._add(name, started_s, attributes)

    def note_thread(self) -> None:
        """A thread has begun to work on it."""
        self._add("queue", self._begun_s, {"reason": "threads"})

    def note_tokens(self) -> None:
        """Some of its tokens have come."""
        if self._decodes_s is None:
            self._decodes_s = time.monotonic()
        self._num_deliveries += 1

    def report(self, instance: str, reason: str, num_prompt_tokens: int) -> SpanReport:
        """What became of it, now that it has ended."""
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
        name = submit.request, submit.attempt
        return SpanReport(*name, "tokenizer", instance, [whole, *self._spans])

    def _add(self, name: str, started_s: float, attributes: Attributes) -> None:
        duration_s = time.monotonic() - started_s
        self._spans.append(Span(name, unix_s(started_s), duration_s, 1, attributes))
