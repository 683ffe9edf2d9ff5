import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.arrivals import MIN_BURSTINESS, all_at_once, at_rate, from_timestamps

nums = st.integers(1, 300)
rates = st.floats(1e-3, 1e5)
shapes = st.floats(MIN_BURSTINESS, 1e6)
seeds = st.integers(0, 2**32 - 1)


@given(nums, rates, shapes, seeds)
def test_times_never_fall_and_stay_in_the_span_that_the_rate_gives(num, rate, shape, seed):
    times = at_rate(num, rate, shape, np.random.default_rng(seed))
    assert times.shape == (num,)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] <= num / rate * (1 + 1e-9)
    assert (times == at_rate(num, rate, shape, np.random.default_rng(seed))).all()


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gaps_vary_as_a_gamma_distribution_of_that_shape(shape: float):
    gaps = np.diff(at_rate(40_000, 10.0, shape, np.random.default_rng(0)))
    assert gaps.mean() == pytest.approx(0.1, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(shape**-0.5, rel=0.05)


@given(st.lists(st.floats(0, 1e9), min_size=1))
def test_a_replay_begins_at_once_and_keeps_the_distances(timestamps):
    times = from_timestamps(timestamps)
    assert times[0] == 0
    assert times[-1] == max(timestamps) - min(timestamps)
    assert (np.diff(times) >= 0).all()


def test_without_a_rate_all_are_due_at_once():
    assert all_at_once(3).tolist() == [0, 0, 0]
