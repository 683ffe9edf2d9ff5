"""Arrival times of requests, in seconds from the start of the load."""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]  # [num_requests], never falling

MIN_BURSTINESS = 0.1
MAX_BURSTINESS = 1e6


def all_at_once(num: int) -> Times:
    """For a closed loop, limited only by the number of open requests."""
    return np.zeros(num)


def at_rate(num: int, per_s: float, burstiness: float, rng: np.random.Generator) -> Times:
    """``num`` arrivals in ``num / per_s`` seconds, with gaps from a gamma distribution of shape
    ``burstiness``: 1 is Poisson, less is burstier, more is nearly even.

    Gaps are scaled so that the span is exact and a short run has the requested rate. For shape 1
    this is a Poisson process conditioned on its number of arrivals.
    """
    ends = np.cumsum(rng.gamma(burstiness, size=num + 1))
    times: Times = ends[:-1] / ends[-1] * (num / per_s)
    return times


def from_timestamps(timestamps_s: list[float]) -> Times:
    """The times of a trace, sorted and relative to the first."""
    times = np.sort(np.asarray(timestamps_s, dtype=float))
    from_first: Times = times - times[0]
    return from_first
