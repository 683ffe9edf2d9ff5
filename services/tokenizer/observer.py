"""The hook of an optional part that follows prompts from their arrival to their end."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from shared.link.peer import Peer
from shared.wire.envelope import RequestOptions
from shared.wire.messages import SpanReport, SpanValue, Submit

Attributes = dict[str, SpanValue]
Measure = Callable[[str], AbstractContextManager[Attributes]]


def unmeasured(step: str) -> AbstractContextManager[Attributes]:
    """Measures nothing."""
    return nullcontext({})


class PromptObserver:
    """Notes nothing of one prompt."""

    def measure(self, step: str) -> AbstractContextManager[Attributes]:
        """Surrounds a step, which may add attributes; on any thread."""
        return unmeasured(step)

    def note_thread(self) -> None:
        """A thread has begun to work on it."""

    def note_tokens(self) -> None:
        """Some of its tokens have come."""

    def end(self, reason: str, num_prompt_tokens: int) -> None:
        """Comes once, when nothing of it is open any more."""


UNOBSERVED = PromptObserver()


class Observer:
    """Observes no prompt, and reports nothing."""

    def __init__(self, instance: str = "") -> None:
        """``instance`` is the name of this tokenizer."""

    def begin(self, submit: Submit, options: RequestOptions, gateway: Peer) -> PromptObserver:
        """A prompt has come from ``gateway``."""
        return UNOBSERVED

    def forward(self, report: SpanReport) -> None:
        """A scheduler has sent it."""

    def take_reports(self) -> Sequence[tuple[Peer, SpanReport]]:
        """Returns the reports since the last call, each with the gateway that gets it."""
        return ()
