"""Estimates how long a step takes, by the draft depth that it verifies."""

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

WINDOW = 16  # times that are kept


class StepTimes:
    """Keeps the seconds of steps at each depth, scaled to the pace that the machine had at first.

    ``depth`` is the one that was decided.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._num_own = 0  # steps since it was decided
        self._times: dict[int, deque[float]] = {}
        self._paces: deque[float] = deque(maxlen=WINDOW)

    @property
    def is_known(self) -> bool:
        return len(self._times) > 1

    def decide(self, depth: int) -> None:
        if depth != self.depth:
            self.depth, self._num_own = depth, 0

    def note(self, depth: int, time_s: float) -> None:
        if depth == self.depth and self._num_own >= WINDOW:
            self._paces.append(time_s / typical(self._times[depth]))
            return
        self._num_own += depth == self.depth
        times = self._times.setdefault(depth, deque(maxlen=WINDOW))
        times.append(time_s / (typical(self._paces) if self._paces else 1.0))

    def cost(self, depth: int) -> float:
        """Returns the seconds of a step at ``depth``: on a line through the two known depths that
        are nearest, but not less than the fastest of all known ones."""
        points = sorted((known, typical(times)) for known, times in self._times.items())
        lines = list(pairwise(points))
        (x0, y0), (x1, y1) = next((line for line in lines if depth <= line[1][0]), lines[-1])
        return max(y0 + (y1 - y0) * (depth - x0) / (x1 - x0), min(y for _, y in points))


def typical(times: Iterable[float]) -> float:
    """Returns the lower quartile: what disturbs a step makes it longer."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]
