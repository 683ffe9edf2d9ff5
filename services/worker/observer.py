"""The hook of an optional part that follows sequences through their slots."""

from shared.wire.messages import SpanReport, StepPlan, StepResult


class Observer:
    """Notes nothing, and reports nothing. Times are unix times."""

    def __init__(self, instance: str) -> None:
        """``instance`` is the name of this worker."""

    def begin(self, plan: StepPlan) -> None:
        """Comes before each step. Raises CodecError for bad options."""

    def end(self, result: StepResult, ended_s: float) -> list[SpanReport]:
        """Comes after each step, in the order of the plans. Returns the reports that its message
        takes along."""
        return []

    def clear(self) -> None:
        """The scheduler is gone, and all slots are free."""
