"""Measured times of steps that decode and nothing else. Pure."""

from collections import deque
from collections.abc import Iterable

NUM_TIMES = 16
MIN_TIMES = 4  # fewer are no measurement


class DecodeTimes:
    """Typical times by size of batch."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._typical_s: dict[int, float] = {}

    def note_decode(self, num_rows: int, step_s: float) -> None:
        """A step of ``num_rows`` decoding rows and nothing else took ``step_s``."""
        size = _size(num_rows)
        times = self._times.setdefault(size, deque(maxlen=NUM_TIMES))
        times.append(step_s)
        if len(times) >= MIN_TIMES:
            self._typical_s[size] = typical(times)

    def typical_s(self, num_rows: int) -> float:
        """0 if batches of about ``num_rows`` have not been measured."""
        return self._typical_s.get(_size(num_rows), 0.0)

    def decode_s(self, num_rows: int) -> float:
        """As ``typical_s``, of the nearest size that was measured; 0 if none was."""
        size, known = _size(num_rows), self._typical_s
        if size not in known and known:
            size = min(known, key=lambda each: (abs(each - size), each))
        return known.get(size, 0.0)


def typical(times: Iterable[float]) -> float:
    """Returns the lower quartile: interference only makes a step longer."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]


def _size(num_rows: int) -> int:
    return max(0, num_rows - 1).bit_length()
