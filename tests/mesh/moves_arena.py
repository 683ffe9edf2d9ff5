"""A worker whose blocks move, by itself: plans of its scheduler, and blocks of another worker."""

import asyncio
import zlib
from typing import Any

import numpy as np
from msgspec.structs import replace

from services.worker.extension import WorkerExtension
from services.worker.moves.extension import WorkerMoves
from services.worker.moves.inbox import Inbox
from services.worker.moves.links import Receiver
from shared.errors import CodecError
from shared.link.extension import is_taken
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    Admit,
    Decode,
    Discard,
    Meet,
    Message,
    Part,
    Prefill,
    Push,
    Pushed,
    StepPlan,
    Take,
)
from tests.mesh.arena_parts import NO_IDS, PLAIN, PROMPT, FakePeer
from tests.mesh.worker_arena import WorkerArena

KEYS = 16 * b"k", 16 * b"l"


class MovesWorkerArena(WorkerArena):
    """A full block goes to another worker; two blocks that have come are put to use, or not."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, is_fast=True)
        self._receiver = Receiver(WorkerConfig(), None, lambda *_: None)
        prompt = np.resize(PROMPT, 33)
        self._block: np.ndarray = np.full(self._part.inbox.block_bytes, 3, np.uint8)
        admit = Admit(0, "a~1/0/0", 1, 0, 0, 33, 33, 0, PLAIN, [0, 1, 2])
        first = StepPlan(1, [], [admit], [], [Prefill(0, 33)], [])
        part = Part(KEYS[0], 2, 1, 1)
        rows = [Push(KEYS[0], 0, "v", part), Take(KEYS[0], 5, part), Discard(KEYS[1], True)]
        second = replace(first, step=2, admit=[], prefill=[], decode=[Decode(0)], rows=rows)
        sums = 2 * [zlib.crc32(self._block.data)]
        pushed, blocks = Pushed([*KEYS], sums), 2 * [self._block]
        self.examples = [
            *((first, [prompt]), (second, [NO_IDS])),
            *((Meet("v", "tcp://127.0.0.1:5000", True), []), (pushed, blocks)),
            (Pushed([*KEYS], sums, "t", 2 * [part]), blocks),
        ]
        num_blocks = engine.capacity.num_blocks

        def lie(row: Push | Take) -> tuple[int, Message, list[np.ndarray]]:
            return 1, replace(second, rows=[row]), [NO_IDS]

        longer = np.append(self._block, self._block[:1])
        self.lies = {
            "a push of a state that is none of the model's": lie(
                Push(KEYS[0], 0, "v", Part(KEYS[0], 2, 0))
            ),
            "a push of a block that the cache has not": lie(Push(KEYS[0], num_blocks, "v")),
            "a push to a stranger": lie(Push(KEYS[0], 0, "u")),
            "a take of a block that has not come": lie(Take(16 * b"m", 5)),
            "a take to a block that the cache has not": lie(Take(KEYS[0], num_blocks)),
            "a block of another size": (3, pushed, [self._block, longer]),
            "blocks without keys": (3, Pushed([], []), blocks),
            "parts for some blocks": (4, replace(pushed, parts=[part]), blocks),
        }

    @property
    def _part(self) -> Any:
        return self._engine.additions[-1].part

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        inbox = self._refill()
        if not isinstance(message, Pushed):
            return await super().take(index, message, arrays)
        moves = WorkerMoves(self._core)
        moves._links.receiver = self._receiver
        try:
            moves.on_pushed(FakePeer(self._scheduler.hello), message, arrays)
        except CodecError:
            return False
        while inbox._num_expected or inbox._num_guests_expected:
            await asyncio.sleep(0)
        moves.close()
        return len(inbox) > 2 or any(inbox._blocks[key] is not self._block for key in KEYS)

    async def close(self) -> None:
        await self._receiver.link.close("the end")

    def _extensions(self) -> list[WorkerExtension]:
        """They have met one worker."""
        extensions = super()._extensions()
        assert is_taken(extensions, self._scheduler, Meet("v"))
        return extensions

    def _refill(self) -> Inbox:
        old = self._part.inbox
        inbox = Inbox(old.num_blocks, old.block_bytes, old.num_guests)
        inbox.expect(2)
        inbox.put(KEYS, 2 * [self._block])
        self._part.use(inbox)
        return inbox
