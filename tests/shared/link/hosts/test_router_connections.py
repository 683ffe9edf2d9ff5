"""Descriptors are reused before we have read of their previous owner's loss."""

import pytest

from shared.link.hosts.router_connections import RouterConnections
from shared.link.sockets.connection import PeerGone

FD = 10_000  # no descriptor of this process


class Sent(list[list[bytes]]):
    def __call__(self, frames) -> None:
        self.append(list(frames))


def test_a_loss_belongs_to_the_oldest_and_a_message_to_the_newest_of_a_descriptor():
    connections, sent = RouterConnections(), Sent()
    connections.accepted(FD)
    first = connections.meet(FD, b"first", None, sent)
    connections.accepted(FD)
    second = connections.meet(FD, b"second", "gateway", sent)
    assert connections.of_route(b"first") is first
    assert connections.of_route(b"second") is second
    second.send([b"a", b"b"])
    assert sent == [[b"second", b"a", b"b"]]
    assert (first.owner, second.owner) == (None, "gateway")
    assert connections.lost(FD) is first
    assert connections.of_route(b"first") is None
    assert connections.lost(FD) is second


def test_a_connection_that_sent_nothing_is_lost_without_its_successor():
    connections = RouterConnections()
    connections.accepted(FD)
    connections.accepted(FD)
    second = connections.meet(FD, b"second", None, Sent())
    silent = connections.lost(FD)
    assert silent is not second
    with pytest.raises(PeerGone):
        silent.send([b"a"])
    assert connections.lost(FD) is second


def test_a_first_message_read_after_the_next_accept_is_not_of_the_next_connection():
    connections = RouterConnections()
    connections.accepted(FD)
    connections.accepted(FD)
    first = connections.meet(FD, b"first", None, Sent())
    second = connections.meet(FD, b"second", None, Sent())
    assert connections.lost(FD) is first
    assert connections.of_route(b"second") is second
    assert connections.lost(FD) is second


def test_a_descriptor_that_was_never_accepted_has_no_connection():
    connections = RouterConnections()
    connections.accepted(FD)
    connections.lost(FD)
    assert connections.lost(FD) is None
    assert connections.meet(FD, b"late", None, Sent()) is None
