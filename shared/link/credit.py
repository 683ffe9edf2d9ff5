"""Grants to senders; all grants of one turn of the event loop go together."""

import asyncio

from shared.link.peer import Peer
from shared.wire.messages import Credit, Grant


class CreditBatch:
    """Streams that go in step are granted more in the same moment."""

    def __init__(self) -> None:
        self._grants: dict[Peer, dict[tuple[str, int], Grant]] = {}

    def add(self, peer: Peer, grant: Grant) -> None:
        """Queues ``grant`` to be sent soon; it replaces one for the same sequence."""
        if not self._grants:
            asyncio.get_running_loop().call_soon(self._flush)
        self._grants.setdefault(peer, {})[grant.request, grant.attempt] = grant

    def _flush(self) -> None:
        by_peer, self._grants = self._grants, {}
        for peer, by_key in by_peer.items():
            peer.send(Credit(list(by_key.values())))
