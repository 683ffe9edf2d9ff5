"""Logs how far loading is."""

from collections.abc import Callable

LINE_S = 5.0

Progress = Callable[[str, float], None]  # the current work, and the share done (0 to 1)


class ProgressLines:
    """Decides when to log progress: at intervals, and never for a short task."""

    def __init__(self, now_s: float) -> None:
        self._due_s = now_s + LINE_S

    def is_due(self, now_s: float) -> bool:
        if now_s < self._due_s:
            return False
        self._due_s = now_s + LINE_S
        return True
