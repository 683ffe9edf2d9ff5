"""Requests that killed workers are refused for a while, and no others."""

import msgspec
import numpy as np
import pytest

from services.scheduler.quarantine import cell as module
from services.scheduler.quarantine.cell import Quarantine
from services.scheduler.sequence import Span
from shared.errors import InvalidRequest
from shared.wire.envelope import RequestOptions
from shared.wire.messages import Item, SamplingParams

PROMPT = np.array([5, 6, 7], np.int32)
PARAMS = SamplingParams(seed=3, temperature=0.5)
PLAIN, SALTED = RequestOptions(), RequestOptions(salt="salt")


@pytest.fixture
def quarantine() -> Quarantine:
    quarantine = Quarantine(600)
    quarantine.add(PROMPT, PARAMS, SALTED, now_s=1000)
    return quarantine


@pytest.mark.parametrize("seed", [3, 4])
def test_the_same_request_is_refused_with_the_time_that_is_left(quarantine: Quarantine, seed: int):
    params = msgspec.structs.replace(PARAMS, seed=seed)
    with pytest.raises(InvalidRequest, match=r"for 588 s \(quarantine-s = 600\)") as caught:
        quarantine.check(PROMPT.copy(), params, SALTED, now_s=1012.5)
    assert (caught.value.code, caught.value.retry_after_s) == ("quarantined", 587.5)


def test_it_may_come_again_when_the_time_is_over(quarantine: Quarantine):
    quarantine.check(PROMPT, PARAMS, SALTED, now_s=1600)
    assert len(quarantine) == 0


def test_others_are_not_refused(quarantine: Quarantine):
    quarantine.check(PROMPT[:2], PARAMS, SALTED, now_s=1000)
    quarantine.check(PROMPT, msgspec.structs.replace(PARAMS, temperature=0.6), SALTED, now_s=1000)
    quarantine.check(PROMPT, PARAMS, PLAIN, now_s=1000)


def test_the_same_request_at_another_priority_is_refused(quarantine: Quarantine):
    with pytest.raises(InvalidRequest):
        quarantine.check(PROMPT, PARAMS, RequestOptions(salt="salt", priority=3), now_s=1000)


def test_the_oldest_give_way_and_one_that_comes_again_is_new(
    quarantine: Quarantine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "MAX_QUARANTINED", 3)
    for number in range(2):
        quarantine.add(np.array([number], np.int32), PARAMS, PLAIN, now_s=1001)
    quarantine.add(PROMPT, PARAMS, SALTED, now_s=1002)
    quarantine.add(np.array([2], np.int32), PARAMS, PLAIN, now_s=1003)
    assert len(quarantine) == 3
    quarantine.check(np.array([0], np.int32), PARAMS, PLAIN, now_s=1003)
    with pytest.raises(InvalidRequest, match="for 599 s"):
        quarantine.check(PROMPT, PARAMS, SALTED, now_s=1003)


def test_without_time_nothing_is_refused():
    quarantine = Quarantine(0)
    quarantine.add(PROMPT, PARAMS, PLAIN, now_s=1)
    quarantine.check(PROMPT, PARAMS, PLAIN, now_s=1)


def test_a_request_with_another_image_is_not_refused():
    quarantine, bad, other = Quarantine(600), images("a"), images("b")
    quarantine.add(PROMPT, PARAMS, PLAIN, 0.0, bad)
    quarantine.check(PROMPT, PARAMS, PLAIN, 1.0, other)
    quarantine.check(PROMPT, PARAMS, PLAIN, 1.0)
    with pytest.raises(InvalidRequest, match="workers died"):
        quarantine.check(PROMPT, PARAMS, PLAIN, 1.0, bad)


def images(letter: str) -> list[Span]:
    """One, without its pixels."""
    image = Item(start=1, num_tokens=1, size=(1, 2, 2), digest=16 * letter.encode())
    return [Span(image, np.zeros(0, np.uint8))]
