"""How long a sequence waited, as its line in the log tells."""

from typing import Any

import numpy as np
import pytest

from services.scheduler.request_log import RequestLog
from services.scheduler.sequence import Ended, Sequence
from shared.errors import Overloaded
from shared.messages import Admit, Generate, SamplingParams

NAME = "mine~0a1b/0/0"
PARAMS = SamplingParams(seed=0)


def generate(attempt: int = 1) -> Generate:
    return Generate(NAME, attempt, 0, 3, PARAMS)


def admitted(attempt: int = 1) -> list[Admit]:
    return [Admit(0, NAME, attempt, 0, 0, 3, 3, 0, PARAMS, [0])]


def ended(reason: str, worker_id: str | None, attempt: int = 1) -> Ended:
    sequence = Sequence(NAME, attempt, 0, 0, (0.0, 0), np.zeros(3, np.int32), PARAMS, [])
    sequence.last_worker_id = worker_id
    return Ended(sequence, reason)


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
    log = RequestLog()
    log.add(generate(), 10.0)
    log.admit(admitted(), 12.5)
    log.admit(admitted(), 20.0)
    log.end(ended("stop", "worker-1/7"), 30.0)
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
    log = RequestLog()
    log.add(generate(), 10.0)
    log.end(ended("cancelled", None), 14.0)
    fields = told()
    assert fields["queued_s"] == 4.0
    assert "worker" not in fields


def test_two_attempts_are_two(told: Any) -> None:
    log = RequestLog()
    for attempt in (1, 2):
        log.add(generate(attempt), 10.0 * attempt)
    log.admit(admitted(2), 21.0)
    for attempt, queued_s in [(2, 1.0), (1, 40.0)]:
        log.end(ended("stop", None, attempt), 50.0)
        fields = told()
        assert (fields["attempt"], fields["queued_s"]) == (attempt, queued_s)


def test_nothing_is_kept_of_what_has_ended(told: Any) -> None:
    log = RequestLog()
    log.add(generate(1), 0.0)
    log.admit(admitted(1), 0.0)
    log.end(ended("stop", None, 1), 0.0)
    told()
    log.add(generate(2), 0.0)
    log.end(ended("stop", None, 2), 0.0)
    assert not log._arrived_s
    assert not log._queued_s


def test_a_refusal_is_told_by_its_code(told: Any) -> None:
    RequestLog().refuse(generate(), Overloaded("full"))
    fields = told()
    assert (fields["request"], fields["reason"]) == ("mine", "overloaded")
