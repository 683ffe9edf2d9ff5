"""The waiting time of a sequence in its log line."""

from typing import Any

import numpy as np
import pytest

from benchmarks.harness.sequences import generate_one
from services.scheduler.metrics import RequestLog
from services.scheduler.sequence import Ended, Sequence
from shared.errors import Overloaded
from shared.wire.envelope import RequestOptions
from shared.wire.messages import EMPTY_ROW, SamplingParams

NAME = "mine~0a1b/0/0"
PARAMS = SamplingParams(seed=0)


def sequence(attempt: int = 1, arrived_s: float = 10.0) -> Sequence:
    return Sequence(
        *(NAME, attempt, 0, 0, (0.0, 0)),
        prompt=np.zeros(3, np.int32),
        params=PARAMS,
        emitted=[],
        arrived_s=arrived_s,
        options=RequestOptions(),
        option_row=EMPTY_ROW,
    )


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """The fields of the one line."""
    caplog.set_level("INFO")

    def told() -> dict[str, Any]:
        (record,) = caplog.records
        caplog.clear()
        fields: dict[str, Any] = vars(record)["fields"]
        return fields

    return told


def test_a_sequence_was_queued_until_it_was_planned_first(told: Any) -> None:
    log, one = RequestLog(), sequence(arrived_s=10.0)
    log.begin([one], 12.5)
    one.last_worker_id = "worker-1/7"
    log.end(Ended(one, "stop"), 30.0)
    assert told() == {
        "request": "mine",
        "name": NAME,
        "attempt": 1,
        "reason": "stop",
        "worker": "worker-1",
        "queued_s": 2.5,
        "num_preemptions": 0,
        "num_worker_deaths": 0,
    }


def test_one_that_was_never_planned_was_queued_to_its_end(told: Any) -> None:
    RequestLog().end(Ended(sequence(arrived_s=10.0), "cancelled"), 14.0)
    fields = told()
    assert fields["queued_s"] == 4.0
    assert "worker" not in fields


def test_two_attempts_are_two(told: Any) -> None:
    log, one, two = RequestLog(), sequence(1, 10.0), sequence(2, 20.0)
    log.begin([two], 21.0)
    for each, queued_s in [(two, 1.0), (one, 40.0)]:
        log.end(Ended(each, "stop"), 50.0)
        fields = told()
        assert (fields["attempt"], fields["queued_s"]) == (each.attempt, queued_s)
    assert not log._queued_s, "ended sequences are forgotten"


def test_a_refusal_is_told_by_its_code(told: Any) -> None:
    RequestLog().refuse(generate_one(NAME, PARAMS), Overloaded("full"))
    fields = told()
    assert (fields["request"], fields["reason"]) == ("mine", "overloaded")
