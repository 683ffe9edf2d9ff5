"""The scheduler's statistics of a worker's last steps."""

import pytest

from services.scheduler.metrics import RecentSteps


def test_an_even_pace_is_found_whenever_one_looks():
    recent = RecentSteps(0.0)
    for step in range(1, 600):
        recent.note(2, 4, 0.016, step / 100)
        if step > 100:
            assert recent.tokens_per_s(step / 100) == pytest.approx(400, rel=0.02)
            assert recent.step_s(step / 100) == pytest.approx(0.008)


def test_steps_before_two_seconds_are_forgotten():
    recent = RecentSteps(0.0)
    recent.note(1, 100, 0.5, 0.9)
    assert recent.tokens_per_s(1.0) == 100
    assert recent.step_s(1.5) == 0.5
    assert recent.tokens_per_s(3.5) == recent.step_s(3.5) == 0
