"""Tokens on their way to a tokenizer: at once, or together with those of the next steps."""

import asyncio

from services.scheduler.emission import Emission
from services.scheduler.tokens_message import StepEmissions, tokens_of
from shared.link.peer import Peer
from shared.wire.messages import SpanReport
from shared.wire.spans import SpanBuffer
from shared.wire.token_arrays import Layout


class Forwarding:
    """Sends what steps bring to one tokenizer, at most once in ``interval_s``: where steps are
    shorter, tokenizer and gateway would do the same work for each of them. First tokens and ends
    do not wait, nor does anything for a step that will not end in time."""

    def __init__(self, peer: Peer, interval_s: float) -> None:
        self.peer = peer
        self._interval_s = interval_s
        self._held: list[StepEmissions] = []
        self._spans = SpanBuffer()
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._decided_s = float("-inf")
        self._is_urgent = self._is_deciding = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, emissions: list[Emission], layout: Layout) -> None:
        step = StepEmissions(emissions, layout)
        self._held.append(step)
        self._is_urgent |= step.is_urgent
        self._decide_soon()

    def add_spans(self, report: SpanReport) -> None:
        """They go out with the end that they belong to."""
        self._spans.add(report)
        self._is_urgent = True
        self._decide_soon()

    def flush(self) -> None:
        held = self.drop()
        if held or self._spans:
            tokens, arrays = tokens_of(held, self._spans.take())
            self._sent_s = self._loop.time()
            self.peer.send(tokens, *arrays)

    def _decide_soon(self) -> None:
        """Once for everything that arrives in this turn."""
        if not self._is_deciding:
            self._is_deciding = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._is_deciding = False
        now_s, due_s = self._loop.time(), self._sent_s + self._interval_s
        next_s, self._decided_s = 2 * now_s - self._decided_s, now_s
        if self._is_urgent or next_s > due_s:
            self.flush()
        elif self._held and self._timer is None:
            self._timer = self._loop.call_at(due_s, self.flush)

    def drop(self) -> list[StepEmissions]:
        """Returns what is held, which is not sent any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_urgent = False
        held, self._held = self._held, []
        return held
