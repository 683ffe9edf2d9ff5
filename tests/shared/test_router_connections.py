"""Descriptors are used again while we have not read of the loss of who had them before."""

from shared.log_once import MAX_KNOWN, LogOnce
from shared.router_connections import RouterConnections

FD = 10_000  # no descriptor of ours


def test_a_loss_belongs_to_the_oldest_and_a_message_to_the_newest_of_a_descriptor():
    connections = RouterConnections()
    connections.accepted(FD)
    connections.newest(FD).route = b"first"
    connections.accepted(FD)
    connections.newest(FD).route = b"second"
    assert connections.lost(FD).route == b"first"
    assert connections.lost(FD).route == b"second"


def test_a_connection_that_sent_nothing_is_lost_without_its_successor():
    connections = RouterConnections()
    connections.accepted(FD)
    connections.accepted(FD)
    connections.newest(FD).route = b"second"
    assert connections.lost(FD).route is None
    assert connections.lost(FD).route == b"second"


def test_a_descriptor_that_was_never_accepted_has_no_connection():
    connections = RouterConnections()
    connections.accepted(FD)
    connections.lost(FD)
    assert connections.lost(FD) is None
    assert connections.newest(FD) is None


def test_a_logged_text_is_known_until_very_many_others_were_logged():
    once = LogOnce()
    assert once.is_new("a")
    assert not once.is_new("a")
    assert all(once.is_new(str(number)) for number in range(MAX_KNOWN))
    assert once.is_new("a")
