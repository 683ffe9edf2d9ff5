"""The requests a tokenizer works on."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass

from services.tokenizer.text_stream import TextStream
from shared.messages import Cancel, RequestKey
from shared.peer import Peer

CHOICE = 0

Key = tuple[str, int]  # request, attempt


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One prompt of one gateway; ``scheduler`` is None until the prompt is encoded and sent."""

    request: str
    attempt: int
    gateway: Peer
    stream: TextStream
    encoding: asyncio.Task[None] | None = None
    scheduler: Peer | None = None
    num_prompt_tokens: int = 0

    @property
    def sequence(self) -> RequestKey:
        """The name the scheduler knows it by: ``request/choice``."""
        return RequestKey(f"{self.request}/{CHOICE}", self.attempt)

    def cancel(self) -> None:
        """Takes it out of the queue of prompts to encode, or back from the scheduler."""
        if self.encoding is not None:
            self.encoding.cancel()
        if self.scheduler is not None:
            self.scheduler.send(Cancel([self.sequence]))


class OpenRequests:
    """The table of them, by the name the gateway gave."""

    def __init__(self) -> None:
        self._table: dict[Key, OpenRequest] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, request: OpenRequest) -> bool:
        return self._table.get((request.request, request.attempt)) is request

    def add(self, request: OpenRequest) -> None:
        self._table[request.request, request.attempt] = request

    def get(self, request: str, attempt: int) -> OpenRequest | None:
        return self._table.get((request, attempt))

    def by_sequence(self, sequence: str, attempt: int) -> OpenRequest | None:
        return self.get(sequence.rpartition("/")[0], attempt)

    def pop(self, request: OpenRequest) -> None:
        del self._table[request.request, request.attempt]

    def pop_all_of(self, peer: Peer) -> Iterator[OpenRequest]:
        """Removes what hangs on a gateway or a scheduler."""
        for request in list(self._table.values()):
            if peer in (request.gateway, request.scheduler):
                self.pop(request)
                yield request
