"""The peers above, which hear of all changes of a list of adapters."""

from collections.abc import Iterable

from shared.link.peer import Peer
from shared.wire.messages import ADAPTERS_MINOR, Adapter, Adapters, Message


def knows_adapters(peer: Peer) -> bool:
    return peer.hello.minor >= ADAPTERS_MINOR


def send_all(peers: Iterable[Peer], message: Message) -> None:
    """Sends ``message``, an order about adapters, to the ``peers`` that know it."""
    for peer in filter(knows_adapters, peers):
        peer.send(message)


class Listeners:
    """Each gets the list first of all, unless it is empty, and again when it changes."""

    def __init__(self) -> None:
        self.adapters: list[Adapter] = []
        self._peers: dict[Peer, None] = {}

    def add(self, peer: Peer) -> None:
        self._peers[peer] = None
        if self.adapters:
            send_all([peer], Adapters(self.adapters))

    def remove(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def announce(self, adapters: list[Adapter]) -> bool:
        """Returns whether ``adapters`` is another list than the last one."""
        if adapters == self.adapters:
            return False
        self.adapters = adapters
        send_all(self._peers, Adapters(adapters))
        return True
