"""The prompts that wait for a tokenizer, and when each of them is due."""

from collections.abc import Iterator

from services.gateway.trip import Trip


class LostTrips:
    """Times are monotonic. Pure.

    One is due when its pause is over, at the latest when it may wait no longer; while no tokenizer
    is ready, then alone.
    """

    def __init__(self) -> None:
        self._trips: set[Trip] = set()

    def __iter__(self) -> Iterator[Trip]:
        return iter(self._trips)

    def add(self, trip: Trip, now_s: float, at_least_s: float = 0.0) -> None:
        trip.backoff.wait(now_s, at_least_s)
        self._trips.add(trip)

    def discard(self, trip: Trip) -> None:
        self._trips.discard(trip)

    def take_due(self, now_s: float, is_ready: bool) -> list[Trip]:
        due = [trip for trip in self._trips if _due_s(trip, is_ready) <= now_s]
        self._trips.difference_update(due)
        return due

    def pause_s(self, now_s: float, is_ready: bool) -> float | None:
        """Seconds until the next one is due."""
        due_s = min((_due_s(trip, is_ready) for trip in self._trips), default=None)
        return None if due_s is None else due_s - now_s


def _due_s(trip: Trip, is_ready: bool) -> float:
    return min(trip.backoff.retry_at_s, trip.replay_until_s) if is_ready else trip.replay_until_s
