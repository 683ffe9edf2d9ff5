"""The rate at which the embedded model is trained."""

import pytest

from models.training.checkpoint import Progress
from models.training.optimizer import rate_factor


def test_it_follows_the_tokens_seen_whatever_the_time():
    late = Progress(elapsed_s=1e6, num_steps=500)
    assert rate_factor(late, budget=1e6, warmup_steps=200) == pytest.approx(1)
    half = Progress(num_steps=500, num_tokens=500_000)
    assert rate_factor(half, budget=1e6, warmup_steps=200) == pytest.approx(0.55)
    end = Progress(num_steps=500, num_tokens=1_000_000)
    assert rate_factor(end, budget=1e6, warmup_steps=200) == pytest.approx(0.1)


def test_it_rises_in_equal_steps_at_the_beginning():
    factors = [rate_factor(Progress(num_steps=step), 1e6, warmup_steps=4) for step in range(5)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1])
