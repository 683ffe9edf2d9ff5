"""Measures how long an engine waits for plans that are to be expected."""


class IdleTime:
    """Counts the time between steps; times are those of one clock.

    A plan is to be expected while the last step left sequences open, even if all of these wait for
    clients who do not read: only the scheduler knows.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None

    def end_step(self, now_s: float, num_open: int) -> None:
        self._since_s = now_s if num_open else None

    def forget(self) -> None:
        """The sequences are gone, so no plan is to be expected."""
        self._since_s = None

    def begin_step(self, now_s: float) -> float:
        """Returns the seconds since the last step, or 0 where no plan was to be expected."""
        return 0.0 if self._since_s is None else now_s - self._since_s
