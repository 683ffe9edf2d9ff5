"""The hook of an optional part that follows sequences from their arrival to their end."""

from collections.abc import Callable

from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, Ended
from shared.wire.messages import SpanReport, StepPlan


class Observer:
    """Notes nothing, and reports nothing. Times are monotonic."""

    def __init__(
        self,
        core: Scheduler,
        instance: str,
        send: Callable[[int, SpanReport], None],
        now_s: float,
    ) -> None:
        """``send`` takes reports for the tokenizer of a route; ``instance`` is the name of this
        scheduler."""

    def begin(self, arrival: Arrival) -> None:
        """Its sequences are in ``core``."""

    def admit(self, worker: str, plan: StepPlan, now_s: float) -> None:
        """``plan`` goes to ``worker``."""

    def account(self, now_s: float) -> None:
        """Comes after each change of the core that may end sequences or let them wait."""

    def end(self, ended: Ended, now_s: float) -> None:
        """A sequence has ended."""

    def forward(self, report: SpanReport) -> None:
        """A worker has sent it."""
