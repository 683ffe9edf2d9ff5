"""Retry times of refused clients."""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from services.gateway.http import admission as module
from services.gateway.http.admission import Admission
from shared.errors import Overloaded


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time is its only item."""
    now_s = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_retry_after_is_the_time_until_one_request_ends_however_many_are_open(
    clock: list[float],
) -> None:
    admission = Admission(max_open=40, max_bytes=1 << 20)
    with ExitStack() as others:
        for _ in range(39):
            others.enter_context(admission.admit())
        for _ in range(30):
            with admission.admit() as reservation:
                reservation.is_served = True
                clock[0] += 4
        others.enter_context(admission.admit())
        with pytest.raises(Overloaded) as refused, admission.admit():
            pass
        assert refused.value.retry_after_s == pytest.approx(4, rel=0.2)
