"""Hook for an optional part that follows sequences from arrival to end."""

from collections.abc import Callable

from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, Ended
from shared.wire.messages import SpanReport, StepPlan


class Observer:
    """Does nothing. Times are monotonic."""

    def __init__(
        self,
        core: Scheduler,
        instance: str,
        send: Callable[[int, SpanReport], None],
        now_s: float,
    ) -> None:
        """``send`` sends a report to the tokenizer of a route. ``instance`` is the name of this
        scheduler."""

    def begin(self, arrival: Arrival) -> None:
        """Called after the core has added the sequences of ``arrival``."""

    def admit(self, worker: str, plan: StepPlan, now_s: float) -> None:
        """Called when ``plan`` is sent to ``worker``."""

    def account(self, now_s: float) -> None:
        """Called after each change of the core that may end sequences or make them wait."""

    def end(self, ended: Ended, now_s: float) -> None:
        """Called for each sequence that has ended."""

    def forward(self, report: SpanReport) -> None:
        """Called with each report of a worker."""
