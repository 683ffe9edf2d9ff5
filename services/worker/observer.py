"""Hook for an optional part that follows sequences through their slots."""

from shared.wire.messages import SpanReport, StepPlan, StepResult


class Observer:
    """Does nothing. Times are unix times."""

    def __init__(self, instance: str) -> None:
        """``instance`` is the name of this worker."""

    def begin(self, plan: StepPlan) -> None:
        """Called before each step. Raises CodecError for bad options."""

    def end(self, result: StepResult, ended_s: float) -> list[SpanReport]:
        """Called after each step, in the order of the plans. Returns reports to send with the
        result."""
        return []

    def clear(self) -> None:
        """The scheduler is lost, and all slots are free."""
