"""The hook of an optional part that follows requests from their arrival to their end."""

from contextlib import AbstractContextManager, nullcontext

from shared.wire.messages import SpanValue

Attributes = dict[str, SpanValue]


class RequestObserver:
    """Notes nothing of one request. Times are monotonic."""

    is_traced = False
    """Whether other services are to report what they do for it."""

    def note_ids(self, ids: set[str]) -> None:
        """Its client knows it by ``ids``."""

    def begin(self, name: str) -> None:
        """The mesh works on it from here on, under ``name``."""

    def measure(self, step: str) -> AbstractContextManager[Attributes]:
        """Surrounds a step, which may add attributes."""
        return nullcontext({})

    def begin_attempt(self, prompt: int, number: int, tokenizer: str, now_s: float) -> None:
        """Attempt ``number`` of a prompt goes to ``tokenizer``."""

    def end_attempt(self, prompt: int, number: int, lost: str, now_s: float) -> None:
        """``lost`` names the service that was lost, or the error; empty: neither."""


UNOBSERVED = RequestObserver()
