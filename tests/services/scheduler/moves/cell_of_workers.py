"""A scheduler service with simulated workers that have inboxes."""

from pathlib import Path
from typing import Any

import numpy as np

from services.scheduler.moves.cell import CellMoves
from services.scheduler.moves.transfers import Transfers
from services.scheduler.scheduler import Planned
from services.scheduler.sequence import Sequence
from services.scheduler.service import SchedulerService
from shared.settings.scheduler import SchedulerConfig
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    MOVES_MINOR,
    PROTOCOL_MAJOR,
    Arrived,
    Attach,
    Capacity,
    Credit,
    Discard,
    Generate,
    Grant,
    Heartbeat,
    Hello,
    Inbox,
    ModelInfo,
    NewSequence,
    Push,
    SamplingParams,
    State,
    StepPlan,
    Take,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.scheduler.moves.moving_worker import MovingWorker, Pushed
from tests.services.scheduler.simulated_worker import next_token

CAPACITY = Capacity(64, 4, 4, 16, 256, 1000)
MODEL = ModelInfo(["m"], "f", 1000, 256, 1)
PROMPT = np.arange(40, dtype=np.int32)
INBOX = Inbox("layout", "here", 100, 1 << 10)


class Worker:
    """A peer of ``cell``, and its simulation. ``rows`` come from all its plans."""

    def __init__(
        self,
        cell: "CellOfWorkers",
        name: str,
        inbox: Inbox | None = INBOX,
        minor: int = MOVES_MINOR,
        **capacity: Any,
    ) -> None:
        self.cell = cell
        self.name = name
        values = {each: getattr(CAPACITY, each) for each in CAPACITY.__struct_fields__} | capacity
        hello = Hello(PROTOCOL_MAJOR, minor, "worker", name, MODEL, Capacity(**values))
        self.peer = FakePeer(hello)
        cell.workers[name] = self
        cell.service.on_up(self.peer)
        self.inbox = inbox
        self.attach()

    def attach(self) -> None:
        assert self.peer.hello.capacity is not None
        num_pieces = 0 if self.inbox is None else self.inbox.num_pieces
        self.simulated = MovingWorker(self.peer.hello.capacity, num_pieces=num_pieces)
        self.rows: list[Any] = []
        self.plans: list[StepPlan] = []
        self.cell.service.on_message(self.peer, Attach(), [])
        if self.inbox is not None:
            self.cell.service.on_message(self.peer, self.inbox, [])

    def drain(self) -> None:
        self.set_state(State.DRAINING)

    def set_state(self, state: State) -> None:
        self.peer.status = Heartbeat(state, "", 0, 100)
        self.peer.on_state()

    def step(self) -> bool:
        """Computes the oldest plan. Blocks that it pushes are on their way."""
        self.cell.service._plan()
        taken = self.peer.take(StepPlan)
        if not taken:
            return False
        self.peer.got = [*taken[1:], *self.peer.got]
        plan, (ids, *_) = taken[0]
        self.plans.append(plan)
        self.rows += plan.rows
        self.simulated.inbox.check(plan)
        result, arrays = self.simulated.step(Planned(plan, ids))
        self.cell.on_the_way += self.simulated.pushed
        self.simulated.pushed.clear()
        self.cell.service.on_message(self.peer, result, list(arrays))
        return True

    def die(self) -> None:
        del self.cell.workers[self.name]
        self.cell.service.on_down(self.peer, "it is killed")

    def rows_of(self, kind: type) -> list[Any]:
        return [row for row in self.rows if isinstance(row, kind)]

    @property
    def pushes(self) -> list[Push]:
        return self.rows_of(Push)

    @property
    def takes(self) -> list[Take]:
        return self.rows_of(Take)

    @property
    def discards(self) -> list[Discard]:
        return self.rows_of(Discard)

    @property
    def admitted(self) -> list[tuple[str, int]]:
        """The requests that it got, with their cached ids."""
        return [
            (row.request.split("~")[0], row.num_cached) for plan in self.plans for row in plan.admit
        ]

    @property
    def running(self) -> list[Sequence]:
        return list(self.transfers.worker.running.values())

    @property
    def transfers(self) -> Transfers:
        return self.cell.moves._transfers[self.peer]


class CellOfWorkers:
    """``on_the_way`` are pushed blocks."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = SchedulerConfig(mesh_dir=folder, instance="s", **settings)
        self.service = SchedulerService(config)
        self.core = self.service._core
        self.workers: dict[str, Worker] = {}
        self.on_the_way: list[Pushed] = []
        self.tokenizer = FakePeer(Hello(PROTOCOL_MAJOR, MOVES_MINOR, "tokenizer", "t", MODEL))
        self.service.on_up(self.tokenizer)
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.sequences: dict[str, list[Sequence]] = {}

    @property
    def moves(self) -> CellMoves:
        (found,) = (each for each in self.service._extensions if isinstance(each, CellMoves))
        return found

    def ask(
        self,
        name: str,
        prompt: np.ndarray = PROMPT,
        max_tokens: int = 40,
        num_choices: int = 1,
        options: RequestOptions | None = None,
        **params: Any,
    ) -> None:
        self.asked[name] = prompt.tolist(), max_tokens
        choices = [NewSequence(f"{name}~1/0/{each}", each) for each in range(num_choices)]
        generate = Generate(
            f"{name}~1/0",
            1,
            SamplingParams(seed=0, max_tokens=max_tokens, **params),
            choices,
            options=write_options(options or RequestOptions()),
        )
        self.service.on_message(self.tokenizer, generate, [prompt, prompt[:0]])
        self.sequences[name] = [self.core.sequences[each.request, 1] for each in choices]

    def grant(self, name: str, num_tokens: int) -> None:
        grant = Grant(f"{name}~1/0/0", 1, num_tokens, 1 << 22)
        self.service.on_message(self.tokenizer, Credit([grant]), [])

    def look(self, num: int = 1) -> None:
        for _ in range(num):
            self.moves.look(0.0)

    def deliver(self, num: int = 1 << 20) -> None:
        """The oldest blocks come to their targets, which tell their scheduler."""
        due, self.on_the_way = self.on_the_way[:num], self.on_the_way[num:]
        for name, key, content, part in due:
            if (worker := self.workers.get(name)) is not None:
                worker.simulated.inbox.put(key, content)
                parts = [] if part is None else [part]
                self.service.on_message(worker.peer, Arrived([key], parts=parts), [])

    def run(self, num: int = 400, delivers: bool = True) -> None:
        """Up to ``num`` rounds in which each worker computes a plan."""
        for _ in range(num):
            has_run = [each.step() for each in [*self.workers.values()]]
            if delivers:
                self.deliver()
            if not any(has_run) and not self.on_the_way:
                return

    def finish(self) -> None:
        """Everything ends, with the right tokens and nothing left."""
        self.run()
        self.look()
        self.run()
        assert not self.core.sequences
        for name, (prompt, max_tokens) in self.asked.items():
            ids = list(prompt)
            for _ in range(max_tokens):
                ids.append(next_token(ids))
            for sequence in self.sequences[name]:
                assert sequence.emitted == ids[len(prompt) :]
        for each in self.workers.values():
            pool = each.transfers.worker.pool
            assert pool.num_free == pool.num_blocks
            assert not len(each.transfers.inbox)
            assert not each.transfers.moves
            assert not each.transfers.incoming
            assert not len(each.simulated.inbox)
