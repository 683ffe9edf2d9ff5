"""Whether a tokenizer has shown that it works."""

from services.gateway.mesh.backoff import Backoff

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Probation:
    """A tokenizer is on probation until it accepts or converts something, and again when it fails
    that. While others are not, it gets one request at a time, and after a failure none
    until a pause is over: one that fails everything would always have the fewest open requests.
    Times are monotonic. Pure.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._begin()

    def _begin(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE_S, MAX_PAUSE_S)

    def succeed(self) -> None:
        self.is_over = True

    def fail(self, now_s: float) -> None:
        if self.is_over:
            self.is_over = False
            self._begin()
        self._backoff.wait(now_s)

    def admits(self, num_open: int, now_s: float) -> bool:
        """Whether it may have a request that others could have."""
        return self.is_over or (num_open == 0 and now_s >= self._backoff.retry_at_s)
