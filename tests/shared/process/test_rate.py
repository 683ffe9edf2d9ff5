from hypothesis import given
from hypothesis import strategies as st

from shared.process.rate import MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, Rate


def test_a_steady_stream_has_its_rate_from_the_first_second_on():
    rate = Rate()
    rate.note(3, 50.0)
    rate.start(now_s=100.0)
    for second in range(1, 200):
        rate.note(5, 100.0 + second)
        assert 4.5 < rate.per_s(100.0 + second) < 6


def test_the_wait_is_the_time_until_the_next_one_ends():
    rate = Rate()
    for number in range(1, 100):
        rate.note(1, 5.0 * number)
    assert 4 < rate.retry_after_s(500.0) < 6


def test_old_events_count_little():
    rate = Rate()
    rate.note(1000, 1.0)
    assert rate.per_s(300.0) < 0.01


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1e3))))
def test_advice_is_always_within_bounds(events: list[tuple[int, float]]):
    rate, now_s = Rate(), 0.0
    for num, pause_s in events:
        now_s += pause_s
        rate.note(num, now_s)
    wait_s = rate.retry_after_s(now_s)
    assert MIN_RETRY_AFTER_S <= wait_s <= MAX_RETRY_AFTER_S
