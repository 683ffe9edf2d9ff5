"""How long what kept sequences from a slot did so."""

from services.scheduler.obstacles import Obstacle

Sums = list[float]  # seconds, by obstacle


class WaitTimes:
    """Adds up the time for which each obstacle was the one of the first that waits; times are
    monotonic. What a sequence waited for is the difference of two sums."""

    def __init__(self, now_s: float) -> None:
        self._sums = [0.0] * len(Obstacle)
        self._obstacle = Obstacle.PLANS_IN_FLIGHT
        self._since_s = now_s

    def note(self, obstacle: Obstacle, now_s: float) -> None:
        """``obstacle`` is the one from now on."""
        self._sums[self._obstacle] += now_s - self._since_s
        self._obstacle, self._since_s = obstacle, now_s

    def sums(self, now_s: float) -> Sums:
        self.note(self._obstacle, now_s)
        return self._sums.copy()


def difference(before: Sums, after: Sums) -> list[tuple[float, Obstacle]]:
    """Returns the seconds that were added between, and to which, the most first."""
    added = [
        (last - first, Obstacle(number))
        for number, (first, last) in enumerate(zip(before, after, strict=True))
        if last > first
    ]
    return sorted(added, reverse=True)
