"""One request's contribution to the metrics, and to its line in the log."""

import time
from collections.abc import Callable
from typing import Any

from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector
from services.gateway.metrics import (
    FINISHED_REQUESTS,
    GENERATION_TOKENS,
    INTER_TOKEN_LATENCY,
    PROMPT_TOKENS,
    REQUEST_GENERATION_TOKENS,
    REQUEST_LATENCY,
    REQUEST_PROMPT_TOKENS,
    TIME_TO_FIRST_TOKEN,
)
from shared.wire.messages import RunKind


class RequestMeter:
    """Measures one request of ``model`` by its progress; times are monotonic. ``charge`` is called
    with the number of its tokens as they are known."""

    def __init__(self, model: str, started_s: float) -> None:
        self._model = model
        self._started_s = started_s
        self.charge: Callable[[int], None] = lambda num_tokens: None
        self._collector: OutputCollector | None = None
        self._ttft_s: float | None = None
        self._num_tokens = 0
        self._delivered_s: dict[int, float] = {}  # when a choice last brought tokens
        self._generation_tokens = GENERATION_TOKENS.labels(model)
        self._inter_token_latency = INTER_TOKEN_LATENCY.labels(model)

    def follow(self, collector: OutputCollector) -> None:
        """From here on the mesh works on the request."""
        self._collector = collector

    def accept(self) -> None:
        PROMPT_TOKENS.labels(self._model).inc(self._num_prompt_tokens)
        self.charge(self._num_prompt_tokens)

    def observe(self, update: ChoiceUpdate) -> None:
        if update.num_tokens and update.run.kind == RunKind.OUTPUT:
            self._count_tokens(update.index, update.num_tokens, time.monotonic())
        if update.finished is not None:
            FINISHED_REQUESTS.labels(self._model, update.finished.reason).inc()

    def end(self) -> None:
        """Every choice has ended."""
        REQUEST_LATENCY.labels(self._model).observe(time.monotonic() - self._started_s)
        REQUEST_PROMPT_TOKENS.labels(self._model).observe(self._num_prompt_tokens)
        REQUEST_GENERATION_TOKENS.labels(self._model).observe(self._num_tokens)

    def facts(self) -> dict[str, Any]:
        """The request's state so far, for the log."""
        collector = self._collector
        return {
            "model": self._model,
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_output_tokens": self._num_tokens,
            "num_replays": collector.num_replays if collector is not None else 0,
            "ttft_s": self._ttft_s,
        }

    @property
    def _num_prompt_tokens(self) -> int:
        return self._collector.num_prompt_tokens if self._collector is not None else 0

    def _count_tokens(self, choice: int, num_tokens: int, now_s: float) -> None:
        if self._ttft_s is None:
            self._ttft_s = now_s - self._started_s
            TIME_TO_FIRST_TOKEN.labels(self._model).observe(self._ttft_s)
        before_s = self._delivered_s.get(choice)
        if before_s is not None:
            self._inter_token_latency.observe((now_s - before_s) / num_tokens)
        self._delivered_s[choice] = now_s
        self._num_tokens += num_tokens
        self._generation_tokens.inc(num_tokens)
        self.charge(num_tokens)
