"""The moves of a worker's blocks as its scheduler and other workers see them."""

import asyncio
import logging
import zlib
from asyncio import Future
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from prometheus_client import Gauge

from services.worker.extension import WorkerCore, WorkerExtension
from services.worker.moves.addition import KVTransfer, TransferPart, is_of_state
from services.worker.moves.inbox import Inbox as Blocks
from services.worker.moves.links import WorkerLinks, location_of
from services.worker.step_thread import call_soon
from shared.errors import CodecError
from shared.link.peer import Peer, count_bad
from shared.wire.codec import Array
from shared.wire.messages import (
    EVERY_LAYER,
    GUESTS_MINOR,
    MOVED_POINTS_MINOR,
    MOVES_MINOR,
    Arrived,
    Capacity,
    Discard,
    Inbox,
    Meet,
    Message,
    Push,
    Pushed,
    Settled,
    StepPlan,
    Take,
)

log = logging.getLogger(__name__)

FULL = Gauge("shoal_inbox_blocks", "KV blocks of other workers that no plan has taken yet")


class WorkerMoves(WorkerExtension):
    """Checks the rows of plans, sends the blocks that they push, and keeps those of other workers.
    Checksums are computed on a thread of their own, in the order of blocks."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        found = [each for each in core.engine.additions if isinstance(each, KVTransfer)]
        self._part: TransferPart | None = found[0].part if found else None
        if self._part is None and (role := core.config.worker_role) != "both":
            log.warning("worker-role: %s has no effect: no block of this worker moves", role)
        self._minor, self._guests_minor = _minors_of(core.engine.capacity)
        self._links = WorkerLinks(core.config, self.on_pushed)
        self._thread = ThreadPoolExecutor(1, "moves")
        if self._part is not None:
            self._inbox = self._part.inbox
            self._part.on_push = partial(call_soon, asyncio.get_running_loop(), self._push)

    async def run(self) -> None:
        if self._part is not None:
            await self._links.run()

    def on_attach(self, home: Peer) -> None:
        others = [each for each in self._core.peers() if each is not home]
        for scheduler in (home, *others):
            self._present(scheduler, home)

    def on_up(self, peer: Peer) -> None:
        if (home := self._core.home()) is not None:
            self._present(peer, home)

    def _present(self, scheduler: Peer, home: Peer) -> None:
        """Tells ``scheduler`` of the inbox. Other cells than that of ``home`` may have guests for
        it."""
        least = self._minor if scheduler is home else self._guests_minor
        receiver = self._links.receiver
        if self._part is None or receiver is None or scheduler.hello.minor < least:
            return
        config, inbox = self._core.config, self._inbox
        scheduler.send(
            Inbox(
                layout=self._part.layout,
                location=location_of(config.mesh_dir),
                num_blocks=inbox.num_blocks,
                block_bytes=inbox.block_bytes,
                address=receiver.address,
                role=config.worker_role,
                num_guests=inbox.num_guests if home.hello.minor >= self._guests_minor else 0,
                cell=home.hello.instance,
                num_pieces=self._part.num_pieces,
            )
        )

    def takes(self, peer: Peer, message: Message, arrays: Sequence[Array] = ()) -> bool:
        if not isinstance(message, Meet):
            return False
        if self._part is None:
            raise CodecError("a Meet for a worker whose blocks do not move")
        if peer is self._core.home():  # a former one may have sent it before it knew
            self._links.meet(message)
        return True

    def check(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        rows = [row for row in plan.rows if isinstance(row, Push | Take | Discard)]
        settled: dict[str, list[bytes]] = defaultdict(list)
        for row in rows:
            for origin in self._check_row(row):
                settled[origin].append(row.key)
        if rows:
            FULL.set(len(self._inbox))
        for scheduler in self._core.peers() if settled else ():
            if keys := settled.get(scheduler.hello.instance):
                scheduler.send(Settled(keys))

    def clear(self) -> None:
        """Plans of the lost scheduler still find its blocks."""
        if self._part is None:
            return
        self._links.forget()
        inbox = self._inbox
        self._inbox = Blocks(inbox.num_blocks, inbox.block_bytes, inbox.num_guests)
        self._core.step_thread.submit(self._part.use, self._inbox)
        FULL.set(0)

    def close(self) -> None:
        self._thread.shutdown(wait=False)

    def on_pushed(self, peer: Peer, message: Pushed, blocks: Sequence[Array]) -> None:
        """Blocks without a scheduler to tell of them are dropped. Raises CodecError."""
        num, size = len(message.keys), self._inbox.block_bytes
        if not num == len(message.checksums) == len(blocks):
            sums = len(message.checksums)
            raise CodecError(f"{num} keys with {sums} checksums and {len(blocks)} blocks")
        if len(message.parts) not in (0, num):
            raise CodecError(f"{num} keys with {len(message.parts)} parts")
        if wrong := [each.nbytes for each in blocks if each.nbytes != size]:
            raise CodecError(f"a block of {wrong[0]} bytes; blocks of this worker have {size}")
        home = self._core.home()
        least = self._guests_minor if message.origin else self._minor
        if home is None or home.hello.minor < least:
            return
        if not message.origin:
            self._inbox.expect(num)
        elif not self._inbox.may_expect_guests(num):
            return
        keep = partial(self._keep, self._inbox, peer, message)
        self._compute(keep, _checked_copies, blocks, message.checksums)

    def _keep(
        self, inbox: Blocks, peer: Peer, message: Pushed, blocks: Sequence[Array] | None
    ) -> None:
        keys, origin = message.keys, message.origin
        if blocks is None:
            inbox.refuse(len(keys), bool(origin))
            receiver = self._links.receiver
            assert receiver is not None
            count_bad(repr(peer), CodecError("a block with another checksum"))
            receiver.link.drop(peer, "a block with another checksum")
        elif inbox is self._inbox:
            inbox.put(keys, blocks, origin)
            FULL.set(len(inbox))
            home = self._core.home()
            assert home is not None
            home.send(Arrived(keys, bool(origin), message.parts))

    def _push(self, inbox: Blocks, rows: list[Push], blocks: Sequence[Array]) -> None:
        """``rows`` are for one worker."""
        if inbox is not self._inbox:  # the plan was an earlier scheduler's
            return
        home = self._core.home()
        are_guests = home is not None and self._links.has_guests(rows[0].worker)
        origin = home.hello.instance if home is not None and are_guests else ""
        send = partial(self._send, inbox, rows, origin, blocks)
        self._compute(send, _checksums, blocks)

    def _send(
        self,
        inbox: Blocks,
        rows: list[Push],
        origin: str,
        blocks: Sequence[Array],
        checksums: list[int],
    ) -> None:
        if inbox is self._inbox:
            parts = [each.part for each in rows if each.part is not None]
            pushed = Pushed([each.key for each in rows], checksums, origin, parts)
            self._links.send(rows[0].worker, pushed, blocks)

    def _compute(
        self, callback: Callable[[Any], None], function: Callable[..., Any], *arguments: Any
    ) -> None:
        """Calls back with the result of ``function``, in the order of calls."""

        def pass_on(done: Future[Any]) -> None:
            if not done.cancelled():
                callback(done.result())

        loop = asyncio.get_running_loop()
        loop.run_in_executor(self._thread, function, *arguments).add_done_callback(pass_on)

    def _check_row(self, row: Push | Take | Discard) -> Iterable[str]:
        """Returns the origins of a guest that the cache has from now on."""
        if self._part is None:
            raise CodecError("the blocks of this worker do not move (kv-transfer)")
        if not isinstance(row, Discard):
            self._check_place(self._part, row)
        match row:
            case Push() if not self._links.has_met(row.worker):
                raise CodecError(f"a push to worker {row.worker}, which this one has not met")
            case Take():
                return self._inbox.take(row.key)
            case Discard():
                origins = self._inbox.discard(row.key)
                return origins if row.is_cached else ()
        return ()

    def _check_place(self, transfer: TransferPart, row: Push | Take) -> None:
        capacity, part = self._core.engine.capacity, row.part
        if not is_of_state(part):
            if row.block >= capacity.num_blocks:
                raise CodecError(
                    f"block {row.block} that moves; the cache has {capacity.num_blocks}"
                )
            return
        if row.block >= (num_states := capacity.num_states or 0):
            raise CodecError(f"state {row.block} that moves; there are {num_states}")
        if part.number >= transfer.num_pieces:
            raise CodecError(f"piece {part.number} of a state with {transfer.num_pieces}")


def _minors_of(capacity: Capacity) -> tuple[int, int]:
    """The first versions with moves of such blocks, and with moves to other cells."""
    if capacity.groups == EVERY_LAYER and capacity.num_states is None:
        return MOVES_MINOR, GUESTS_MINOR
    return MOVED_POINTS_MINOR, MOVED_POINTS_MINOR


def _checksums(blocks: Sequence[Array]) -> list[int]:
    return [zlib.crc32(each.data) for each in blocks]


def _checked_copies(blocks: Sequence[Array], checksums: Sequence[int]) -> list[Array] | None:
    """Copies, since the ``blocks`` may be parts of a larger frame. None if one has another
    checksum."""
    copies: list[Array] = [np.array(each) for each in blocks]
    return copies if _checksums(copies) == [*checksums] else None
