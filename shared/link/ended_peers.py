"""Peers whose connection has ended, for a while."""

from collections.abc import Iterator
from typing import NamedTuple

from shared.link.peer import Peer

MEMORY_S = 30.0
MAX_ENDED = 1024


class EndedPeer(NamedTuple):
    peer: Peer
    is_lost: bool  # it said no Bye
    ended_s: float  # monotonic


class EndedPeers:
    """Remembers each for ``MEMORY_S``, or until a process of that name is connected again."""

    def __init__(self) -> None:
        self._by_name: dict[tuple[str, str], EndedPeer] = {}  # oldest first

    def add(self, peer: Peer, is_lost: bool, now_s: float) -> None:
        self.pop(peer)
        self._by_name = {_name(each.peer): each for each in self.recent(now_s)}
        self._by_name[_name(peer)] = EndedPeer(peer, is_lost, now_s)
        if len(self._by_name) > MAX_ENDED:
            del self._by_name[next(iter(self._by_name))]

    def pop(self, peer: Peer) -> EndedPeer | None:
        """Forgets the one of the same name, which it returns."""
        return self._by_name.pop(_name(peer), None)

    def recent(self, now_s: float) -> Iterator[EndedPeer]:
        return (each for each in self._by_name.values() if now_s - each.ended_s <= MEMORY_S)


def _name(peer: Peer) -> tuple[str, str]:
    return peer.hello.service, peer.hello.instance
