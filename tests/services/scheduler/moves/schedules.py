"""Random schedules of workers that push blocks to each other."""

from collections import deque
from itertools import groupby
from pathlib import Path
from random import Random
from typing import Any, ClassVar
from unittest.mock import patch

from msgspec.structs import replace

from services.scheduler.block_pool import KeepPoint
from services.scheduler.extension import Cell, OtherCells
from services.scheduler.moves.cell import CellMoves
from services.scheduler.moves.fetch import Fetch
from services.scheduler.moves.fetches import MAX_FETCHES
from services.scheduler.moves.transfers import Transfers
from services.scheduler.scheduler import Planned
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.link.peer import Peer
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import (
    EVERY_LAYER,
    Arrived,
    Discard,
    Heartbeat,
    Inbox,
    Meet,
    ModelInfo,
    Part,
    Push,
    State,
    Take,
)
from tests.mesh.arena_parts import FakePeer, connect
from tests.services.scheduler.moves.moving_worker import Content, MovingWorker
from tests.services.scheduler.schedules import WEIGHTS, Mesh, run_schedule

CONFIG = SchedulerConfig(mesh_dir=Path("/nonexistent"), instance="s")
MODEL = ModelInfo(["m"], "f", 1000, 64, 1)
Block = tuple[bytes, Content, Part | None]


def run_moving(number: int) -> "MovingMesh":
    random = Random(number)
    with (
        patch("services.scheduler.moves.move.NEAR_TOKENS", random.choice([2, 5, 10, 32])),
        patch("services.scheduler.moves.roles.LONG_TOKENS", random.choice([1, 8, 512])),
        patch("services.scheduler.moves.fetches.MIN_TOKENS", random.choice([1, 4, 16, 128])),
    ):
        mesh = run_schedule(number, MovingMesh)
    assert isinstance(mesh, MovingMesh)
    return mesh


class MovingMesh(Mesh):
    """Workers of random roles have inboxes in two locations. Blocks of one worker for another come
    in their order, some time later, or never. A draining worker may change its mind."""

    weights: ClassVar[dict[str, float]] = {
        **WEIGHTS,
        "join": 3,
        "run": 6,
        "drain": 6,
        "deliver": 6,
        "cut": 0.5,
        "look": 1,
        "attach_again": 0.5,
    }

    def __init__(self, random: Random) -> None:
        self.peers: dict[str, FakePeer] = {}
        self.on_the_way: dict[tuple[str, str], deque[Block]] = {}
        self.has_met: set[tuple[str, str]] = set()
        self.cell: CellMoves | None = None
        self.roles = random.choice([["both"], ["both", "prefill", "decode"], ["prefill", "decode"]])
        self.locations = random.choice(["a", "a", "ab"])
        self.block_bytes = random.choice([1, 1, 1, 3 << 20, 20 << 20])
        self.all_workers: list[MovingWorker] = []
        self.num_lost = 0
        self.is_plain, self.num_pieces = random.random() < 0.5, random.choice([1, 2, 5])
        self.is_over = False
        self.num_first = 0
        super().__init__(random)
        self.num_first += random.choice([0, 1, 2, 2])
        self.copy_interval = random.choice([1, 4, 4, 16])

    # --- workers --------------------------------------------------------------------------------

    def join(self) -> None:
        if not self.events:  # sizes are the real ones as yet
            self.num_first += 1
            return
        if self.cell is None:
            changes: dict[str, Any] = {"num_stages": 1} if self.random.random() < 0.95 else {}
            if self.is_plain:
                changes |= {"groups": EVERY_LAYER, "num_states": None}
            elif self.random.random() < 0.5:
                num_states = self.random.choice([0, 1, 3, 12, 12])
                changes |= {"groups": EVERY_LAYER, "num_states": num_states}
            size = self.random.choice([1, 1, 4, self.capacity.block_size])
            num = self.capacity.num_blocks * self.random.choice([1, 2, 5])
            changes |= {"block_size": size, "num_blocks": num}
            self.capacity = replace(self.capacity, **changes)
            if self.capacity.num_states is None:
                self.num_pieces = 0
            peers: dict[str, Peer] = self.peers  # type: ignore[assignment]
            others = OtherCells(self.core, {}, "s", lambda: None)
            self.cell = CellMoves(Cell(CONFIG, self.core, peers, others, lambda: None))
            self.cell._fetches.on_begin = lambda: None
        before = {*self.workers}
        super().join()
        for worker_id in self.workers.keys() - before:
            self.attach(worker_id)

    def attach(self, worker_id: str) -> None:
        plain, random = self.workers[worker_id], self.random
        worker = MovingWorker(
            plain.capacity,
            plain.stop,
            is_fast=plain.is_fast,
            repeats=plain.repeats,
            num_pieces=self.num_pieces,
        )
        self.workers[worker_id] = worker
        self.all_workers.append(worker)
        peer = self.peers[worker_id] = connect("worker", MODEL, plain.capacity, worker_id)
        if random.random() < 0.95:
            inbox = Inbox(
                layout=random.choice(["one"] * 9 + ["two"]),
                location=random.choice(self.locations),
                num_blocks=random.choice([1, 3, 10, 100]),
                block_bytes=self.block_bytes,
                address=random.choice(["", "tcp://there:1"]),
                role=random.choice(self.roles),  # type: ignore[arg-type]
                num_pieces=self.num_pieces,
            )
            assert self.cell is not None
            assert self.cell.takes(peer, inbox)

    def left(self, before: set[str]) -> None:
        """Some of the blocks that a lost worker has pushed still come."""
        assert self.cell is not None
        for worker_id in before - self.workers.keys():
            self.cell.on_detach(self.peers.pop(worker_id))
            for pair in [each for each in self.on_the_way if worker_id in each]:
                if worker_id == pair[1] or self.random.random() < 0.5:
                    del self.on_the_way[pair]
            self.has_met = {each for each in self.has_met if worker_id not in each}

    def kill_worker(self) -> None:
        before = {*self.workers}
        super().kill_worker()
        self.left(before)

    def release_worker(self) -> None:
        before = {*self.workers}
        super().release_worker()
        self.left(before)

    def attach_again(self) -> None:
        """As a lost worker, and a new one of the same name and process."""
        if self.workers:
            before = {*self.workers}
            self.kill_worker()
            (worker_id,) = before - self.workers.keys()
            number, self.num_workers = self.num_workers, int(worker_id) - 1
            self.join()
            self.num_workers = number

    def drain(self) -> None:
        """The one with the most sequences, or any one."""
        if not self.workers:
            return
        busiest = max(self.workers, key=lambda each: len(self.core.workers[each].running))
        chosen = self.random.choice([busiest, busiest, *sorted(self.workers)])
        for worker_id in self.workers:
            if self.random.random() < 0.7:
                self.set_state(worker_id, State.READY)
        self.set_state(chosen, State.DRAINING)

    def set_state(self, worker_id: str, state: State) -> None:
        self.peers[worker_id].status = Heartbeat(state, "", 0, 0)
        self.core.note_state(worker_id, state == State.READY)

    def look(self) -> None:
        assert self.cell is not None
        for _ in range(self.random.choice([1, 1, 1, 6, 40])):
            self.cell.look(0.0)

    # --- blocks ---------------------------------------------------------------------------------

    def plan(self) -> None:
        super().plan()
        for worker_id, worker in self.workers.items():
            assert isinstance(worker, MovingWorker)
            for target, *block in worker.pushed:
                if target in self.workers:
                    queue = self.on_the_way.setdefault((worker_id, target), deque())
                    queue.append((block[0], block[1], block[2]))  # type: ignore[arg-type]
            worker.pushed.clear()
        if self.is_over:
            self.deliver()
            assert self.cell is not None
            self.cell.look(0.0)

    def check_plan(self, worker: WorkerState, planned: Planned, runnable: list[Sequence]) -> None:
        super().check_plan(worker, planned, runnable)
        peer, rows = self.peers[worker.worker_id], planned.plan.rows
        for message, _ in peer.take(Meet):
            self.has_met.add((worker.worker_id, message.worker))
        worker_of = self.workers[worker.worker_id]
        assert isinstance(worker_of, MovingWorker)
        worker_of.inbox.check(planned.plan)
        most = max(1, min(256, (8 << 20) // self.block_bytes))
        pushes = [each for each in rows if isinstance(each, Push)]
        assert len(pushes) <= most
        assert sum(isinstance(each, Take | Discard) for each in rows) <= most
        assert all((worker.worker_id, each.worker) in self.has_met for each in pushes)
        slots = {row.slot for row in planned.plan.prefill}
        slots |= {row.slot for row in planned.plan.decode}
        assert not any(worker.running[slot].allocated.is_held for slot in slots)

    def content_of(self, key: bytes, part: Part | None) -> Content:
        size = self.capacity.block_size
        if part is None:
            return self.names[key][-size:]
        contexts = self.names[part.point]
        assert len(contexts) == part.num_blocks * size
        if part.group is None:
            return (len(contexts), contexts[-1]), part.number
        return contexts[part.number * size : (part.number + 1) * size]

    def run(self) -> None:
        delay = self.random.choice([1, 1, 2, 5, 100])
        for number in range(self.random.choice([1, 3, 10, 20])):
            self.plan()
            if number % delay == 0:
                self.deliver()
            for worker_id in list(self.results):
                self.absorb_from(worker_id)

    def deliver(self) -> None:
        for pair in [*self.on_the_way]:
            self.deliver_to(pair, self.random.choice([0, 1, 3, 1000]))

    def deliver_to(self, pair: tuple[str, str], num: int) -> None:
        queue = self.on_the_way[pair]
        arrived: list[tuple[bytes, Part | None]] = []
        worker = self.workers.get(pair[1])
        assert isinstance(worker, MovingWorker)
        for _ in range(min(num, len(queue))):
            key, content, part = queue.popleft()
            assert content == self.content_of(key, part)
            worker.inbox.put(key, content)
            arrived.append((key, part))
        if not queue:
            del self.on_the_way[pair]
        transfers = self.transfers.get(pair[1])
        if transfers is None:
            return
        assert len(worker.inbox) <= transfers.message.num_blocks
        assert self.cell is not None
        for has_parts, group in groupby(arrived, lambda each: each[1] is not None):
            keys, parts = zip(*group, strict=True)
            message = Arrived([*keys], parts=[*parts] if has_parts else [])
            assert self.cell.takes(self.peers[pair[1]], message)

    def cut(self) -> None:
        """The blocks between two workers are lost."""
        if self.on_the_way:
            self.num_lost += len(self.on_the_way.pop(self.random.choice(sorted(self.on_the_way))))

    @property
    def transfers(self) -> dict[str, Transfers]:
        assert self.cell is not None
        found = self.cell._transfers
        return {key: found[peer] for key, peer in self.peers.items() if peer in found}

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        assert self.cell is not None
        self.cell.reset_prefix_cache()
        assert not any(each.moves for each in self.transfers.values())
        assert not any(each.fetches for each in self.transfers.values())

    # --- invariants -----------------------------------------------------------------------------

    def check(self) -> None:
        while self.num_first:  # after the first event
            self.num_first -= 1
            self.join()
        super().check()
        for transfers in self.transfers.values():
            for sequence, move in transfers.moves.items():
                assert move in move.target.incoming
                assert move.target in self.transfers.values()
                assert sequence is move.sequence
                running = transfers.worker.running.values()
                assert move.is_over or sequence in running
                assert not move.is_switching or move.is_over or sequence.allocated.is_held
            assert all(each.target is transfers for each in transfers.incoming)
            assert all(each.source in self.transfers.values() for each in transfers.incoming)
            self.check_held(transfers)
            self.check_fetches(transfers)

    def points_of(self, worker: WorkerState) -> dict[bytes, KeepPoint]:
        """Without the parts of those that come."""
        points = super().points_of(worker)
        transfers = self.transfers.get(worker.worker_id)
        if transfers is None:
            return points
        coming = transfers.points._coming.values()
        units = {unit for each in coming for unit in each.units.values()}
        return {name: each for name, each in points.items() if each not in units}

    def pinned(self, worker: WorkerState) -> list[int]:
        transfers = self.transfers.get(worker.worker_id)
        blocks = [] if transfers is None else transfers.pins._blocks.values()
        return [block for each in blocks for block in each]

    def check_fetches(self, transfers: Transfers) -> None:
        assert self.cell is not None
        fetches = self.cell._fetches._fetches
        assert len(transfers.fetches) <= MAX_FETCHES
        assert len(transfers.served) <= MAX_FETCHES
        assert transfers.pins._blocks.keys() <= transfers.served.keys()
        for each in (*transfers.fetches, *transfers.served):
            assert isinstance(each, Fetch)
            assert fetches[each.sequence] is each
            assert each.source in self.transfers.values()
            assert each.target in self.transfers.values()

    def check_held(self, transfers: Transfers) -> None:
        """A sequence is held only while a plan in flight computes it, or its last keep point is on
        its way, and then moves."""
        for sequence in transfers.worker.running.values():
            move = transfers.moves.get(sequence)
            if sequence.allocated.is_held:
                assert move is not None
                assert move.is_in_flight or transfers.shape.has_points

    def finish(self) -> None:
        """Nobody is told to stop any more."""
        for worker_id in self.peers:
            self.set_state(worker_id, State.READY)
        self.is_over = True
        super().finish()
        assert self.cell is not None
        for _ in range(60):
            self.settle_down()
        for transfers in self.transfers.values():
            assert not len(transfers.inbox)
            assert not transfers.moves
            assert not transfers.incoming
            assert not transfers.fetches
            assert not transfers.served
            assert not transfers._pushed
        for worker in self.workers.values():
            assert isinstance(worker, MovingWorker)
            assert not len(worker.inbox)

    def settle_down(self) -> None:
        assert self.cell is not None
        self.deliver()
        self.cell.look(0.0)
        self.plan()
        for worker_id in list(self.results):
            self.absorb_from(worker_id)
