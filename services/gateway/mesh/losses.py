"""The services lost while they had a prompt, since its last token, and pauses before the next try.
Pure."""

from shared.errors import TOO_MANY_REPLAYS, InternalError

MAX_REPLAYS = 2
MAX_SPARED = 8
SAME_HANG_S = 10.0  # as long as shoal serve lets a service hang


class Losses:
    """Charges a prompt with the loss of a service that was working on it, for the prompt may be the
    reason: of a tokenizer that had not accepted it, and of its scheduler.

    Other losses only have a bound: of a tokenizer that had accepted it, and of a service that lives
    after all. Every method that notes a loss raises InternalError above the limit.
    """

    def __init__(self) -> None:
        self._charged: list[str] = []
        self._num_spared = 0
        self._last_scheduler = ("", 0.0)

    @property
    def num_charged(self) -> int:
        return len(self._charged)

    def lose_tokenizer(self, tokenizer: str, was_accepted: bool) -> None:
        if was_accepted:
            self._spare()
        else:
            self._charge(tokenizer)

    def lose_scheduler(self, scheduler: str, now_s: float) -> None:
        """A scheduler that hangs is missed by one tokenizer after another, and a replay may come to
        each of them just before: that is one loss."""
        name, lost_s = self._last_scheduler
        if scheduler != name or now_s - lost_s >= SAME_HANG_S:
            self._charge(scheduler)
            self._last_scheduler = scheduler, now_s

    def forgive(self, service: str) -> None:
        """``service`` is alive: it had only stalled. Raises nothing."""
        num_before = len(self._charged)
        self._charged = [each for each in self._charged if each != service]
        self._num_spared += num_before - len(self._charged)

    def clear(self) -> None:
        """A token has come."""
        self._charged, self._num_spared = [], 0

    def _charge(self, service: str) -> None:
        if len(self._charged) == MAX_REPLAYS:
            raise InternalError(
                f"{MAX_REPLAYS + 1} services died while they worked on this request",
                code=TOO_MANY_REPLAYS,
            )
        self._charged.append(service)

    def _spare(self) -> None:
        if self._num_spared >= MAX_SPARED:
            raise InternalError(
                f"{MAX_SPARED + 1} services were lost while they had this request",
                code=TOO_MANY_REPLAYS,
            )
        self._num_spared += 1


class Backoff:
    """The time of the next try: each pause is twice as long as the one before. Times are
    monotonic."""

    def __init__(self, first_s: float, max_s: float) -> None:
        self.retry_at_s = 0.0
        self._pause_s = first_s
        self._max_s = max_s

    def wait(self, now_s: float, at_least_s: float = 0.0) -> None:
        """Begins the next pause."""
        self.retry_at_s = now_s + max(self._pause_s, at_least_s)
        self._pause_s = min(2 * self._pause_s, self._max_s)
