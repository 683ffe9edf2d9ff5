import math

import pytest

from shared.link.peer import RoundTrip
from shared.wire.messages import Heartbeat, State

STATUS = Heartbeat(State.READY, "", 0, 0)


def heartbeat(echo_s: float, held_s: float = 0.0) -> Heartbeat:
    return Heartbeat(State.READY, "", 0, 0, sent_s=900.0, echo_s=echo_s, held_s=held_s)


def test_the_time_a_peer_held_a_heartbeat_is_left_out_whatever_its_clock():
    ours, theirs = RoundTrip(), RoundTrip()
    assert theirs.note_heartbeat(ours.stamped(STATUS, 10.0), 7_000.0) is None
    assert ours.note_heartbeat(theirs.stamped(STATUS, 7_000.75), 11.0) == 0.25
    assert theirs.note_heartbeat(ours.stamped(STATUS, 11.5), 7_001.5) == 0.25


def test_an_echo_counts_once_and_the_next_one_again():
    round_trip = RoundTrip()
    assert round_trip.note_heartbeat(heartbeat(echo_s=10.0, held_s=0.5), 11.0) == 0.5
    assert round_trip.note_heartbeat(heartbeat(echo_s=10.0, held_s=1.5), 12.0) is None
    assert round_trip.note_heartbeat(heartbeat(echo_s=12.0), 12.5) == 0.5


def test_a_peer_of_an_older_version_gets_no_echo_and_sends_none():
    round_trip = RoundTrip()
    assert round_trip.note_heartbeat(STATUS, 10.0) is None
    stamped = round_trip.stamped(STATUS, 11.0)
    assert (stamped.sent_s, stamped.echo_s, stamped.held_s) == (11.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("echo_s", "held_s"),
    [(11.0, 0.0), (math.inf, 0.0), (math.nan, 0.0), (-5.0, 0.0), (9.0, -1.0), (9.0, 1.5),
     (9.0, math.nan), (9.0, math.inf)],
)  # fmt: skip
def test_an_echo_that_cannot_be_true_does_not_count(echo_s: float, held_s: float):
    round_trip = RoundTrip()
    assert round_trip.note_heartbeat(heartbeat(echo_s, held_s), 10.0) is None
    assert round_trip.note_heartbeat(heartbeat(9.5), 10.0) == 0.5
