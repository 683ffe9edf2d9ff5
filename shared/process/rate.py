"""Rates of completion, for estimates of the wait for a free place."""

from math import exp

MEMORY_S = 20.0
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
UNKNOWN_RETRY_AFTER_S = 5.0  # until the first end


class Rate:
    """Ends per second while there is work; an end ``MEMORY_S`` ago weighs 1/e of a new one."""

    def __init__(self) -> None:
        self._started_s = self._updated_s = 0.0
        self._weight = 0.0

    def start(self, now_s: float) -> None:
        """Forgets the past: work begins after an idle time."""
        self._started_s = self._updated_s = now_s
        self._weight = 0.0

    def note(self, num: int, now_s: float) -> None:
        self._weight = self._decayed(now_s) + num
        self._updated_s = now_s

    def per_s(self, now_s: float) -> float:
        """0 until the first end."""
        seen = 1 - exp(-(now_s - self._started_s) / MEMORY_S)
        return self._decayed(now_s) / (MEMORY_S * seen) if seen > 0 else 0.0

    def retry_after_s(self, now_s: float) -> float:
        """The expected time until the next end, and with it a free place."""
        per_s = self.per_s(now_s)
        wait_s = 1 / per_s if per_s > 0 else UNKNOWN_RETRY_AFTER_S
        return min(max(wait_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _decayed(self, now_s: float) -> float:
        return self._weight * exp(-(now_s - self._updated_s) / MEMORY_S)
