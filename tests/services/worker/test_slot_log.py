"""A sequence is logged when it leaves its slot, for every reason."""

import pytest

from services.worker.service import SlotLog
from shared.wire.messages import Admit, Decode, SamplingParams, StepPlan


def plan(release: list[int], admit: dict[int, str], num_steps: int = 1) -> StepPlan:
    params = SamplingParams(seed=0)
    rows = [Admit(slot, name, 1, 0, 0, 3, 3, 0, params, [0]) for slot, name in admit.items()]
    return StepPlan(1, release, rows, [], [], [Decode(0)], 0, num_steps)


def logprobs(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, int]]:
    """(name, slot, number of steps) of each line since the last call."""
    lines = [vars(record)["fields"] for record in caplog.records]
    caplog.clear()
    return [(line["name"], line["slot"], line["num_steps"]) for line in lines]


def test_a_slot_that_changes_hands_in_one_plan_is_logged_for_the_sequence_that_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    log = SlotLog()
    log.note(plan([], {0: "a~1/0/0", 1: "b~1/0/0"}))
    log.note(plan([], {}, num_steps=3))
    assert logprobs(caplog) == []
    log.note(plan([1], {1: "c~1/0/0"}))
    assert logprobs(caplog) == [("b~1/0/0", 1, 4)]
    log.note(plan([1, 0], {}))
    assert logprobs(caplog) == [("c~1/0/0", 1, 1), ("a~1/0/0", 0, 5)]


def test_all_leave_with_their_scheduler_and_the_next_one_begins_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    log = SlotLog()
    log.note(plan([], {0: "a~1/0/0", 1: "b~1/0/0"}))
    log.clear()
    assert logprobs(caplog) == [("a~1/0/0", 0, 1), ("b~1/0/0", 1, 1)]
    log.note(plan([], {0: "a~1/0/0"}))
    log.note(plan([0], {}))
    assert logprobs(caplog) == [("a~1/0/0", 0, 1)]
