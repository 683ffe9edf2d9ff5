"""A scheduler's link by itself: workers' connections and their descriptions."""

from pathlib import Path

import msgspec

from services.scheduler.service import SchedulerService
from shared.errors import CodecError
from shared.settings.scheduler import SchedulerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    CELLS_MINOR,
    PROTOCOL_MAJOR,
    Attach,
    Detach,
    Group,
    Heartbeat,
    Hello,
    Message,
    Overview,
    PoolingInfo,
    Release,
    State,
)
from tests.mesh.arena_parts import Example, FakePeer, Lies, connect
from tests.mesh.scheduler_arena import SchedulerArena

MODEL, CAPACITY = SchedulerArena.model, SchedulerArena.capacity


class LinkArena:
    """A worker connects next to another, which stays; then both are lost."""

    def __init__(self, directory: Path) -> None:
        self._service = SchedulerService(SchedulerConfig(mesh_dir=directory, instance="s"))
        pooling = PoolingInfo("embed", "last", "normalize", 64, ["fish"], True, [8])
        model = msgspec.structs.replace(
            MODEL, runner="pooling", pooling=pooling, media=["image"], more_media=["video"]
        )
        groups = Group(), Group(8)
        capacity = msgspec.structs.replace(CAPACITY, pooled_size=64, groups=groups)
        hello = Hello(PROTOCOL_MAJOR, 0, "worker", "new", model, capacity, still_s=0.5)
        overview = Overview("s", 1, 2, 3, 4, 1, 8, True, "w")
        heartbeat = Heartbeat(State.READY, "", 1, 2, 1.0, 1.0, 0.5, overview, [overview])
        unnamed = msgspec.structs.replace(overview, scheduler="a b")
        small = msgspec.structs.replace(CAPACITY, max_model_len=16)
        messages = (hello, heartbeat, Release(), Attach(), Detach())
        self.examples: list[Example] = [(message, []) for message in messages]
        self.lies: Lies = {
            "another context than its model's": (
                0,
                Hello(PROTOCOL_MAJOR, 0, "worker", "x", MODEL, small),
                [],
            ),
            "an overview of nobody": (1, msgspec.structs.replace(heartbeat, overview=unnamed), []),
            "another overview of nobody": (
                1,
                msgspec.structs.replace(heartbeat, more_overviews=[overview, unnamed]),
                [],
            ),
        }

    async def close(self) -> None:
        await self._service._link.close("the end")

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        """Before it is attached, if the message is for that state."""
        link, first = self._service._link, connect("worker", MODEL, CAPACITY)
        if isinstance(self.examples[index][0], Attach):
            first.hello = msgspec.structs.replace(first.hello, minor=CELLS_MINOR)
        link.up(first)
        is_good = self._meet(message) if index == 0 else self._hear(first, message, arrays)
        assert first in link.peers
        for peer in list(link.peers):
            link.down(peer, "the end", is_lost=True)
        assert not self._service._workers
        return is_good

    def _meet(self, message: Message) -> bool:
        link = self._service._link
        if link.refusal(message, "worker") is not None or not isinstance(message, Hello):
            return False
        link.up(FakePeer(message))
        return True

    def _hear(self, peer: FakePeer, message: Message, arrays: list[Array]) -> bool:
        try:
            if isinstance(message, Heartbeat):
                peer.note_heartbeat(message)
            else:
                self._service.on_message(peer, message, arrays)
        except CodecError:
            return False
        return True
