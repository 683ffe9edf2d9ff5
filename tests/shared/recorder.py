"""A service that only records the calls of its link."""

import asyncio

from shared.link.keys import Keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Message,
    ServiceName,
    State,
)

TIMEOUT_S = 10


class Recorder:
    def __init__(
        self,
        service: ServiceName,
        instance: str,
        refuses: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.link = Link(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, service, instance), self, keys)
        self.state = State.READY
        self.refuses = refuses
        self.ups: asyncio.Queue[Peer] = asyncio.Queue()
        self.downs: asyncio.Queue[tuple[Peer, str]] = asyncio.Queue()
        self.messages: asyncio.Queue[tuple[Peer, Message, list[Array]]] = asyncio.Queue()

    def status(self) -> Heartbeat:
        return Heartbeat(self.state, "", 0, 0)

    def refusal(self, hello: Hello) -> str | None:
        return self.refuses

    def on_up(self, peer: Peer) -> None:
        self.ups.put_nowait(peer)

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        self.messages.put_nowait((peer, message, arrays))

    def on_down(self, peer: Peer, reason: str) -> None:
        self.downs.put_nowait((peer, reason))


async def got(queue: asyncio.Queue):
    async with asyncio.timeout(TIMEOUT_S):
        return await queue.get()
