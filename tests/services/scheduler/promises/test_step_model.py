"""Predicted times of steps."""

from random import Random

import pytest

from services.scheduler.promises.step_model import StepModel
from shared.wire.messages import Capacity

CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=64, max_num_batched_tokens=512,
                    max_model_len=8192)  # fmt: skip


def cost_s(num_rows: int, num_tokens: int, num_pairs: int) -> float:
    own_s = 0.001 + 0.0004 * num_rows if num_rows else 0.0
    return own_s + (0.002 + 3e-5 * num_tokens + 4e-9 * num_pairs if num_tokens else 0.0)


def learned(noise: float, num_steps: int = 300) -> StepModel:
    """Steps next to 1 to 8 streams; interference makes them up to ``noise`` longer."""
    random, times = Random(1), StepModel(CAPACITY)
    for _ in range(num_steps):
        num_rows = random.choice([1, 2, 4, 8])
        times.note_decode(num_rows, cost_s(num_rows, 0, 0) * (1 + noise * random.random()))
        num_tokens, num_keys = random.randint(16, 512), random.randint(0, 7000)
        num_pairs = num_tokens * (num_keys + num_tokens // 2)
        step_s = cost_s(num_rows, num_tokens, num_pairs) * (1 + noise * random.random())
        times.note_prompts(num_rows, num_tokens, num_pairs, step_s)
    return times


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.02), (0.2, 0.15)])
def test_predictions_are_near_the_measured_times(noise: float, tolerance: float) -> None:
    times, random = learned(noise), Random(2)
    for num_rows in (1, 2, 4, 8):
        assert times.decode_s(num_rows) == pytest.approx(cost_s(num_rows, 0, 0), rel=tolerance)
        for _ in range(50):
            num_tokens, num_keys = random.randint(64, 512), random.randint(0, 7000)
            num_pairs = num_tokens * (num_keys + num_tokens // 2)
            predicted_s = times.decode_s(num_rows) + times.prompts_s(num_tokens, num_pairs)
            expected_s = cost_s(num_rows, num_tokens, num_pairs) * (1 + noise / 2)
            assert predicted_s == pytest.approx(expected_s, rel=tolerance)


@pytest.mark.parametrize("num_keys", [0, 1000, 7000])
def test_as_many_tokens_as_fit_a_time(num_keys: int) -> None:
    times = learned(0.0)
    num_tokens = times.num_tokens_within(0.01, num_keys)
    assert num_tokens is not None
    most = 0.01 + 3 * 3e-5
    assert 0.009 < times.prompts_s(num_tokens, num_tokens * (num_keys + num_tokens // 2)) < most
    assert times.num_tokens_within(0.001, num_keys) == 0, "less than the fixed cost"


def test_one_disturbed_step_spoils_little() -> None:
    times = learned(0.0)
    before_s = times.prompts_s(256, 256 * 128)
    times.note_prompts(1, 256, 256 * 128, 2.0)
    assert times.prompts_s(256, 256 * 128) < 1.5 * before_s


def test_equal_steps_are_told_apart_by_their_tokens() -> None:
    times = StepModel(CAPACITY)
    for _ in range(20):
        times.note_prompts(0, 512, 512 * 256, 0.02)
    assert times.prompts_s(256, 256 * 128) == pytest.approx(0.01, rel=0.25)


def test_nothing_is_predicted_before_a_measurement() -> None:
    times = StepModel(CAPACITY)
    assert times.decode_s(1) == times.prompts_s(64, 64) == 0
    assert times.num_tokens_within(1.0, 0) is None
    times.note_prompts(0, 100, 5000, 0.01)
    assert times.prompts_s(100, 5000) > 0
