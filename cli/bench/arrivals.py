"""When requests are sent: arrival times in seconds from the start of the load."""

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]  # [num_requests], never falling

MIN_BURSTINESS = 0.1
MAX_BURSTINESS = 1e6


def all_at_once(num: int) -> Times:
    """What a closed loop wants: only the number of open requests holds one back."""
    return np.zeros(num)


def at_rate(num: int, per_s: float, burstiness: float, rng: np.random.Generator) -> Times:
    """``num`` arrivals in ``num / per_s`` seconds, with gaps from a gamma distribution of shape
    ``burstiness``: 1 is Poisson, less comes in bursts, more is nearly even.

    The gaps are scaled so that the span is exact: a short run has the rate that was asked for.
    For a shape of 1 that is a Poisson process of which the number of arrivals is known.
    """
    ends = np.cumsum(rng.gamma(burstiness, size=num + 1))
    times: Times = ends[:-1] / ends[-1] * (num / per_s)
    return times


def from_timestamps(timestamps_s: list[float]) -> Times:
    """Those of a trace in its own order of time; the first one comes at once."""
    times = np.sort(np.asarray(timestamps_s, dtype=float))
    from_first: Times = times - times[0]
    return from_first
