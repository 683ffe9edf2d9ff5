"""Pauses between tries, each twice as long as the one before."""


class Backoff:
    """The time of the next try; times are monotonic. Pure."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self.retry_at_s = 0.0
        self._pause_s = first_s
        self._max_s = max_s

    def wait(self, now_s: float, at_least_s: float = 0.0) -> None:
        """Begins the next pause."""
        self.retry_at_s = now_s + max(self._pause_s, at_least_s)
        self._pause_s = min(2 * self._pause_s, self._max_s)
