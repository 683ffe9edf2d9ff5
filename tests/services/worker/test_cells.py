"""The scheduler of a worker, and its moves to another."""

import random

import pytest
from msgspec.structs import replace

from services.worker.attachment import SETTLED_S, Attachment, choose_scheduler
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Attach,
    Detach,
    Heartbeat,
    Hello,
    Overview,
    Release,
    State,
)
from tests.mesh.arena_parts import FakePeer

PATIENCE_S = 10.0


class Scheduler(FakePeer):
    def __init__(self, name: str, minor: int = PROTOCOL_MINOR) -> None:
        super().__init__(Hello(PROTOCOL_MAJOR, minor, "scheduler", name))
        self.workers: list[str] = []
        self.beat()

    def beat(self, is_leaving: bool = False) -> None:
        spare = self.workers[-1] if self.workers else ""
        name, num = self.hello.instance, len(self.workers)
        overview = Overview(name, num, 0, 0, 0, 0, 0, is_leaving, spare)
        self.status = Heartbeat(State.READY, "", 0, 0, overview=overview)

    @property
    def heard(self) -> list[type]:
        return [type(message) for message, _ in self.got]


class Cells:
    """Schedulers and workers, which check in turn; heartbeats arrive in between."""

    def __init__(self, num_schedulers: int) -> None:
        self.now_s = 0.0
        self.schedulers: list[Scheduler] = []
        self.workers: dict[str, Attachment] = {}
        for _ in range(num_schedulers):
            self.add_scheduler()

    def add_scheduler(self) -> Scheduler:
        scheduler = Scheduler(f"s{random.getrandbits(64):x}")
        self.schedulers.append(scheduler)
        for worker in self.workers.values():
            worker.add(scheduler, self.now_s)
        return scheduler

    def add_worker(self) -> None:
        name = f"w{len(self.workers)}"
        worker = Attachment(name, lambda: self.schedulers, PATIENCE_S, lambda: None)
        self.workers[name] = worker
        for scheduler in self.schedulers:
            worker.add(scheduler, self.now_s)

    def remove(self, scheduler: Scheduler) -> None:
        self.schedulers.remove(scheduler)
        for worker in self.workers.values():
            worker.lose(scheduler)

    def look(self, is_idle: bool = True) -> int:
        """Returns the number of workers with a new scheduler."""
        before = {name: worker.home for name, worker in self.workers.items()}
        self.now_s += 0.5
        for name, worker in self.workers.items():
            worker.look(self.now_s, is_idle)
            for scheduler in self.schedulers:
                for message, _ in scheduler.got:
                    if isinstance(message, Attach):
                        scheduler.workers.append(name)
                    elif isinstance(message, Detach):
                        scheduler.workers.remove(name)
                scheduler.got.clear()
        for scheduler in self.schedulers:
            scheduler.beat()
        return sum(worker.home is not before[name] for name, worker in self.workers.items())

    @property
    def sizes(self) -> list[int]:
        """Checks that no worker is in two cells."""
        names = [name for scheduler in self.schedulers for name in scheduler.workers]
        assert sorted(names) == sorted(self.workers), "each worker has one scheduler"
        for name, worker in self.workers.items():
            assert isinstance(worker.home, Scheduler)
            assert name in worker.home.workers
        return sorted(len(scheduler.workers) for scheduler in self.schedulers)

    def settle(self) -> None:
        """Until no worker moves within the time a worker must wait to move."""
        for _ in range(500):
            if not sum(self.look() for _ in range(round(2 * SETTLED_S) + 2)):
                return
        pytest.fail("workers move for ever")


@pytest.mark.parametrize("seed", range(10))
def test_workers_share_themselves_out_and_stay_whatever_schedulers_come_and_go(seed: int) -> None:
    random.seed(seed)
    cells = Cells(random.randint(1, 4))
    for _ in range(random.randint(1, 12)):
        cells.add_worker()
        if random.random() < 0.5:
            cells.look()
    for _ in range(6):
        if len(cells.schedulers) > 1 and random.random() < 0.5:
            cells.remove(random.choice(cells.schedulers))
        else:
            cells.add_scheduler()
        cells.settle()
        assert cells.sizes[-1] - cells.sizes[0] <= 1


def test_arrivals_cause_no_move_without_a_gain() -> None:
    cells = Cells(2)
    for _ in range(2):
        cells.add_worker()
        cells.look()
    assert cells.sizes == [1, 1]
    cells.add_scheduler()
    assert not any(cells.look() for _ in range(30))


def test_a_worker_that_moves_takes_its_time_and_one_whose_scheduler_is_lost_does_not() -> None:
    cells = Cells(1)
    cells.add_worker()
    cells.add_worker()
    cells.look()
    cells.add_scheduler()
    (first, second) = cells.schedulers
    until_s = cells.now_s + SETTLED_S
    while cells.now_s < until_s:
        assert not any(worker.is_moving for worker in cells.workers.values())
        cells.look(is_idle=False)
    cells.look(is_idle=False)
    moving = [worker for worker in cells.workers.values() if worker.is_moving]
    assert [worker.home for worker in moving] == [first]
    moving[0].look(cells.now_s + PATIENCE_S, is_idle=False)
    moving[0].look(cells.now_s + 2 * PATIENCE_S, is_idle=False)
    assert first.heard == [Release], "once"
    moving[0].look(cells.now_s + 2 * PATIENCE_S, is_idle=True)
    assert (first.heard, second.heard) == ([Release, Detach], [Attach])
    (other,) = (worker for worker in cells.workers.values() if worker is not moving[0])
    cells.schedulers.remove(first)
    other.lose(first)
    other.look(cells.now_s, is_idle=False)
    assert other.home is second


def test_a_worker_stays_if_its_cell_comes_to_need_it() -> None:
    cells = Cells(1)
    cells.add_worker()
    cells.add_worker()
    cells.look()
    (first,) = cells.schedulers
    cells.add_scheduler()
    (moving,) = [worker for worker in cells.workers.values() if until_it_moves(cells, worker)]
    first.workers.remove("w0")
    first.beat()
    moving.look(cells.now_s, is_idle=True)
    assert not moving.is_moving
    assert moving.home is first


def until_it_moves(cells: Cells, worker: Attachment) -> bool:
    for _ in range(round(2 * SETTLED_S) + 2):
        cells.look(is_idle=False)
    return worker.is_moving


def test_of_schedulers_one_that_stays_is_chosen_and_left_is_one_that_does_not() -> None:
    first, second, unknown = Scheduler("a"), Scheduler("b"), Scheduler("c")
    unknown.status = Heartbeat(State.NOT_READY, "no heartbeat yet", 0, 0)
    first.workers, second.workers = [], ["w1", "w2"]
    first.beat(is_leaving=True)
    second.beat()
    assert choose_scheduler("w", [first, second, unknown]) is second
    assert choose_scheduler("w", [first, unknown]) is first
    assert choose_scheduler("w", [unknown]) is None
    worker = Attachment("w", lambda: [first, second], PATIENCE_S, lambda: None)
    worker.home = first
    for peer in (first, second):
        worker.add(peer, 0.0)
    worker.look(0.1, is_idle=False)
    assert worker.home is first, "its sequences end first"
    worker.look(0.2, is_idle=True)
    assert worker.home is second


def test_a_scheduler_that_knows_of_no_others_has_whoever_connects() -> None:
    old = Scheduler("old", minor=2)
    old.status = replace(old.status, overview=Overview("old", 1, 0, 0, 0, 0))
    worker = Attachment("w", lambda: [old], PATIENCE_S, lambda: None)
    worker.add(old, 0.0)
    worker.look(0.1, is_idle=True)
    assert worker.home is old
    assert not old.got
