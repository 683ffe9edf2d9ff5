"""Blocks that simulated workers push to each other, past the schedulers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.scheduler.moves.cell import CellMoves
from services.scheduler.moves.transfers import Transfers
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import (
    EVERY_LAYER,
    GUESTS_MINOR,
    MOVED_POINTS_MINOR,
    MOVES_MINOR,
    Arrived,
    Discard,
    Inbox,
    Meet,
    Message,
    Part,
    Push,
    Settled,
    StepPlan,
    Take,
    WorkerRole,
)
from tests.services.scheduler.moves.moving_worker import Content, Inboxed
from tests.sim.network import LATENCY_S, MOMENT_S
from tests.sim.stores import StoringService
from tests.sim.virtual_loop import Process, VirtualLoop

Block = tuple[bytes, Content, Part | None]


@dataclass(frozen=True)
class MoveShape:
    """Of the workers' inboxes. ``roles`` belong to one worker and another."""

    roles: tuple[WorkerRole, ...] = ("both",)
    locations: tuple[str, ...] = ("here",)
    address: str = ""
    num_blocks: int = 100
    num_guests: int = 50
    block_bytes: int = 1 << 10
    num_pieces: int = 2  # of a state

    @classmethod
    def drawn(cls, draw: Callable[..., Any]) -> "MoveShape":
        both: tuple[WorkerRole, ...] = ("both",)
        drawn = cls(
            roles=draw(both, both, ("prefill", "decode"), ("decode", "both", "prefill")),
            locations=draw(("here",), ("here",), ("here", "there")),
            address=draw("", "tcp://workers:1"),
            num_blocks=draw(100, 2, 8),
            num_guests=draw(50, 50, 3, 0),
            block_bytes=draw(1 << 10, 3 << 20),
        )
        # Not drawn, so that the other draws of a seed stay.
        return replace(drawn, num_pieces=1 + drawn.num_blocks % 5)


class Exchange:
    """The links between workers. A pair's blocks come in order, while both processes live. ``find``
    returns the service of a worker that runs."""

    def __init__(self, loop: VirtualLoop, find: Callable[[str], "MovingService | None"]) -> None:
        self._loop = loop
        self._find = find
        self._arrivals_s: dict[tuple[Process, Process], float] = {}
        self._cuts: dict[Process, int] = {}
        self.delay_s = LATENCY_S

    def send(self, source: Process, name: str, blocks: list[Block], origin: str) -> None:
        """Guests have the scheduler of their ``origin``."""
        target = self._find(name)
        if target is None:
            return
        loop, pair = self._loop, (source, target.process)
        due_s = loop.now_s + self.delay_s * loop.random.uniform(0.3, 3)
        due_s = self._arrivals_s[pair] = max(self._arrivals_s.get(pair, 0.0) + MOMENT_S, due_s)
        context = target.process.context.copy()
        arguments = target, self._cuts.get(source, 0), source, blocks, origin
        loop.call_later(due_s - loop.now_s, self._arrive, *arguments, context=context)

    def _arrive(
        self,
        target: "MovingService",
        num_cuts: int,
        source: Process,
        blocks: list[Block],
        origin: str,
    ) -> None:
        if num_cuts == self._cuts.get(source, 0):
            target.on_pushed(blocks, origin)

    def cut(self, source: Process) -> None:
        """All that ``source`` has on its way is lost."""
        self._cuts[source] = self._cuts.get(source, 0) + 1


class MovingService(StoringService):
    """Pushes blocks through the ``exchange``, and tells schedulers of its inbox when it attaches,
    if it ``knows_moves``."""

    def __init__(
        self,
        *arguments: Any,
        process: Process,
        exchange: Exchange,
        shape: MoveShape,
        knows_moves: bool,
        **others: Any,
    ) -> None:
        super().__init__(*arguments, **others)
        self.process = process
        self.inbox: Inboxed = self._engine_of().worker.inbox
        self._exchange = exchange
        self._shape = shape
        self._knows_moves = knows_moves
        self._has_met: dict[str, bool] = {}  # whether blocks for it are guests
        self._origins: dict[bytes, set[str]] = {}  # of guests in the inbox
        self._number = int(self._config.instance[1:])
        capacity = self._engine_of().capacity
        is_plain = capacity.groups == EVERY_LAYER and capacity.num_states is None
        self._minor = MOVES_MINOR if is_plain else MOVED_POINTS_MINOR
        self._guests_minor = GUESTS_MINOR if is_plain else MOVED_POINTS_MINOR
        self._num_pieces = 0 if capacity.num_states is None else shape.num_pieces
        self._greeted: Peer | None = None

    def _forget_sequences(self) -> None:
        """The engine uses the new inbox once it is reset."""
        self._has_met.clear()
        self._origins.clear()
        self._greeted = None
        self.inbox = Inboxed()
        self._engine_of().next_inboxes.append(self.inbox)
        super()._forget_sequences()

    def _attach(self) -> None:
        super()._attach()
        home = self._attachment.home
        if home is None or home is self._greeted:
            return
        self._greeted = home
        for each in (home, *(each for each in self._peers() if each is not home)):
            self._present(each, home)

    def on_up(self, peer: Peer) -> None:
        super().on_up(peer)
        if self._greeted is not None and self._greeted is self._attachment.home:
            self._present(peer, self._greeted)

    def _present(self, scheduler: Peer, home: Peer) -> None:
        shape, number = self._shape, self._number
        least = self._minor if scheduler is home else self._guests_minor
        if not self._is_told(scheduler, least):
            return
        scheduler.send(
            Inbox(
                layout="layout",
                location=shape.locations[number % len(shape.locations)],
                num_blocks=shape.num_blocks,
                block_bytes=shape.block_bytes,
                address=shape.address,
                role=shape.roles[number % len(shape.roles)],
                num_guests=shape.num_guests if home.hello.minor >= self._guests_minor else 0,
                cell=home.hello.instance,
                num_pieces=self._num_pieces,
            )
        )

    def _is_told(self, scheduler: Peer, least: int) -> bool:
        return self._knows_moves and scheduler.hello.minor >= least

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        if not isinstance(message, Meet):
            super().on_message(peer, message, arrays)
        elif self._is_home(peer):
            self._has_met[message.worker] = message.are_guests

    def _step(self, peer: Peer, plan: StepPlan, ids: np.ndarray, pixels: Sequence[Array]) -> None:
        pushes = (row for row in plan.rows if isinstance(row, Push))
        assert all(row.worker in self._has_met for row in pushes), "a push to a stranger"
        self.inbox.check(plan)
        for row in plan.rows:
            if isinstance(row, Take | Discard) and (origins := self._origins.pop(row.key, set())):
                is_here = isinstance(row, Take) or row.is_cached
                for each in self._peers() if is_here else ():
                    if each.hello.instance in origins:
                        each.send(Settled([row.key]))
        super()._step(peer, plan, ids, pixels)

    def _send_result(self, peer: Peer, output: Any, *arguments: Any) -> None:
        if output.exception() is None:
            pushed = self._engine_of().pushed.pop(output.result()[0].step, [])
            for worker, *block in pushed if self._is_home(peer) else []:
                origin = peer.hello.instance if self._has_met[worker] else ""
                self._exchange.send(self.process, worker, [tuple(block)], origin)
        super()._send_result(peer, output, *arguments)

    def on_pushed(self, blocks: list[Block], origin: str) -> None:
        home = self._attachment.home
        least = self._guests_minor if origin else self._minor
        if home is None or home is not self._greeted or not self._is_told(home, least):
            return
        num_guests, shape = len(self._origins), self._shape
        num_here = num_guests if origin else len(self.inbox) - num_guests
        if num_here + len(blocks) > (shape.num_guests if origin else shape.num_blocks):
            return  # of own blocks: from before it attached here, and the link ends
        for key, content, part in blocks:
            self.inbox.put(key, content)
            if origin:
                self._origins.setdefault(key, set()).add(origin)
            home.send(Arrived([key], bool(origin), [] if part is None else [part]))


def moving_in(service: Any) -> dict[str, int]:
    """Counts the moves of a scheduler, and the blocks whose plans it awaits."""
    found = _transfers_of(service)
    cells = (each for each in service._extensions if isinstance(each, CellMoves))
    guests = [guest for cell in cells for guest in cell._guests.values()]
    return {
        "fetches": sum(len(each.fetches) + len(each.served) for each in found),
        "pinned blocks": sum(len(each.pins._blocks) for each in found),
        "moves": sum(len(each.moves) + len(each.incoming) for each in found),
        "sequences that are due": sum(len(each.due) for each in found),
        "moves to other cells": sum(len(each.incoming) for each in guests),
        "settled guests": sum(len(each._settled) for each in guests),
        "blocks in inboxes": sum(
            place.has_arrived for each in found for place in each.inbox._places.values()
        ),
        "pushes": sum(len(each._pushed) for each in found),
    }


def check_moves(service: Any) -> None:
    """At rest, a block that is on its way is none that anyone waits for."""
    for each in _transfers_of(service):
        assert not any(place.is_usable for place in each.inbox._places.values())
        assert not each.num_meant


def _transfers_of(service: Any) -> list[Transfers]:
    cells = (each for each in service._extensions if isinstance(each, CellMoves))
    return [each for cell in cells for each in cell._transfers.values()]
