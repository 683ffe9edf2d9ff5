"""A bucket of tokens that fills by itself."""


class TokenBucket:
    """Holds at most what ``per_minute`` pours in; times are monotonic. Pure.

    It may go below empty: how much a request takes is known when it has ended, and the next request
    waits until the bucket is above empty again.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._updated_s = now_s

    def take(self, num: int, now_s: float) -> None:
        self._left = self._filled(now_s) - num
        self._updated_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until there is a token in it."""
        return max(0.0, (1 - self._filled(now_s)) * 60 / self.per_minute)

    def _filled(self, now_s: float) -> float:
        poured = (now_s - self._updated_s) * self.per_minute / 60
        return min(self.per_minute, self._left + poured)
