"""Sequences that no other worker of the cell can have go to another cell, with their blocks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler.moves.inbox import TRANSFER_S
from services.scheduler.moves.moves import MOVES
from services.scheduler.worker_state import LOOK_S
from shared.errors import CodecError
from shared.wire.messages import (
    GUESTS_MINOR,
    PROTOCOL_MAJOR,
    Arrived,
    Discard,
    Heartbeat,
    Hello,
    Inbox,
    Lost,
    Meet,
    Overview,
    Settled,
    State,
    Take,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.scheduler.moves.cell_of_workers import (
    CAPACITY,
    INBOX,
    MODEL,
    PROMPT,
    CellOfWorkers,
    Worker,
)

THEIRS = replace(INBOX, num_guests=50, cell="t")
OTHER = Overview("t", 1, 0, 0, 64, 64, 4)
KEYS = [bytes([number]) * 16 for number in range(4)]


def done(result: str = "done") -> float:
    return MOVES.labels("leaving", result)._value.get()


class Elsewhere:
    """A worker of another cell, which this one knows by its inbox alone."""

    def __init__(self, cell: CellOfWorkers, inbox: Inbox = THEIRS) -> None:
        self.cell = cell
        hello = Hello(PROTOCOL_MAJOR, GUESTS_MINOR, "worker", "far", MODEL, CAPACITY)
        self.peer = FakePeer(hello)
        cell.service.on_up(self.peer)
        self.present(inbox)

    def present(self, inbox: Inbox) -> None:
        self.cell.service.on_message(self.peer, inbox, [])

    def distrust_all(self) -> None:
        guest = self.cell.moves._guests[self.peer]
        guest.distrust([*guest._settled])

    def settle(self) -> list[bytes]:
        """A plan of its cell takes all blocks that have come; returns their keys."""
        keys = [key for name, key, *_ in self.cell.on_the_way if name == "far"]
        self.cell.on_the_way.clear()
        if keys:
            self.cell.service.on_message(self.peer, Settled(keys), [])
        return keys


def with_one(tmp_path: Path, **settings: Any) -> tuple[CellOfWorkers, Worker]:
    """A cell that knows another one, and whose only worker computes a sequence."""
    cell = CellOfWorkers(tmp_path, **settings)
    cell.tokenizer.status = Heartbeat(State.READY, "", 0, 0, overview=OTHER)
    one = Worker(cell, "one", minor=GUESTS_MINOR)
    cell.ask("r", max_tokens=80)
    cell.run(6)
    assert len(one.running) == 1
    return cell, one


async def go_on(cell: CellOfWorkers, far: Elsewhere, num: int = 30) -> list[bytes]:
    """Returns the blocks that settled."""
    settled: list[bytes] = []
    for _ in range(num):
        cell.run(1, delivers=False)
        settled += far.settle()
        await asyncio.sleep(0)
    return settled


def handed_over(cell: CellOfWorkers) -> list[str]:
    return [key.request for each, _ in cell.tokenizer.take(Lost) for key in each.keys]


async def test_a_sequence_is_handed_over_once_its_blocks_are_there(tmp_path: Path):
    cell, one = with_one(tmp_path)
    far, num_done = Elsewhere(cell), done()
    (sequence,) = one.running
    one.drain()
    settled = await go_on(cell, far)
    assert [each for each, _ in one.peer.take(Meet)] == [Meet("far", "", True)]
    assert handed_over(cell) == ["r~1/0"]
    assert not one.running
    assert len(settled) >= len(PROMPT) // 4
    assert settled == [sequence.block_hash(each, 4) for each in range(len(settled))]
    assert done() == num_done + 1


async def test_it_goes_on_here_while_blocks_do_not_come(tmp_path: Path):
    cell, one = with_one(tmp_path)
    Elsewhere(cell)
    given_up = done("given_up")
    one.drain()
    cell.run(4, delivers=False)
    assert one.pushes
    for _ in range(int(TRANSFER_S / LOOK_S) + 1):
        cell.look()
    assert done("given_up") == given_up + 1
    assert not handed_over(cell)
    cell.on_the_way.clear()
    cell.run(delivers=False)
    assert not cell.core.sequences


@pytest.mark.parametrize(
    "inbox",
    [
        replace(THEIRS, num_guests=0),
        replace(THEIRS, layout="other"),
        replace(THEIRS, location="there"),
    ],
)
async def test_workers_without_use_for_the_blocks_get_none(tmp_path: Path, inbox: Inbox):
    cell, one = with_one(tmp_path)
    Elsewhere(cell, inbox)
    one.drain()
    cell.run(10)
    assert not one.pushes
    assert one.running


async def test_a_worker_of_a_cell_that_leaves_gets_none(tmp_path: Path):
    """A third cell stays, so sequences may be handed over."""
    cell, one = with_one(tmp_path)
    third = replace(OTHER, scheduler="u")
    cell.tokenizer.status = Heartbeat(
        State.READY, "", 0, 0, overview=replace(OTHER, is_leaving=True), more_overviews=[third]
    )
    Elsewhere(cell)
    one.drain()
    cell.run(10)
    assert not one.pushes


async def test_distrusted_blocks_are_pushed_again(tmp_path: Path):
    cell, one = with_one(tmp_path)
    far = Elsewhere(cell)
    one.drain()
    cell.run(3, delivers=False)
    settled = far.settle()
    assert settled
    far.distrust_all()
    assert {*settled} <= {*await go_on(cell, far)}
    assert handed_over(cell) == ["r~1/0"]


async def test_only_blocks_that_were_pushed_settle(tmp_path: Path):
    cell, one = with_one(tmp_path)
    far = Elsewhere(cell)
    one.drain()
    cell.run(2, delivers=False)
    cell.service.on_message(far.peer, Settled(KEYS), [])
    assert not any(map(cell.moves._guests[far.peer].has, KEYS))


async def test_a_worker_that_knows_no_guests_pushes_none(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    cell.tokenizer.status = Heartbeat(State.READY, "", 0, 0, overview=OTHER)
    one = Worker(cell, "one", minor=GUESTS_MINOR - 1)
    Elsewhere(cell)
    cell.ask("r")
    cell.run(6)
    one.drain()
    cell.run(10)
    assert not one.pushes


async def test_a_worker_of_the_cell_comes_first(tmp_path: Path):
    cell, one = with_one(tmp_path)
    Elsewhere(cell)
    Worker(cell, "two")
    one.drain()
    cell.run(40)
    assert {each.worker for each in one.pushes} == {"two"}
    cell.finish()


@pytest.mark.parametrize("why", ["it is gone", "it changes its cell"])
async def test_the_loss_of_the_other_worker_costs_nothing(tmp_path: Path, why: str):
    cell, one = with_one(tmp_path)
    far, lost = Elsewhere(cell), done("lost")
    one.drain()
    cell.run(3, delivers=False)
    if why == "it is gone":
        cell.service.on_down(far.peer, "it is killed")
    else:
        far.present(replace(THEIRS, cell="u"))
    assert done("lost") == lost + 1
    assert one.running
    cell.on_the_way.clear()
    cell.run(delivers=False)


async def test_guests_of_other_cells_become_hits(tmp_path: Path):
    cell, one = with_one(tmp_path)
    Elsewhere(cell)
    one.drain()
    cell.run(8, delivers=False)
    other = CellOfWorkers(tmp_path)
    two = Worker(other, "two", replace(INBOX, num_guests=50))
    for _, key, content, _ in cell.on_the_way:
        two.simulated.inbox.put(key, content)
    keys = [key for _, key, *_ in cell.on_the_way]
    other.service.on_message(two.peer, Arrived(keys, True), [])
    other.run()
    assert [each.key for each in two.takes] == keys
    other.ask("r", max_tokens=20)
    other.run()
    ((_, num_cached),) = two.admitted
    assert num_cached >= len(PROMPT) - 4
    other.finish()


async def test_guests_are_counted_apart(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", replace(INBOX, num_blocks=2, num_guests=2))
    for key in KEYS:
        one.simulated.inbox.put(key, [0, 1, 2, 3])
    cell.service.on_message(one.peer, Arrived(KEYS[:2], True), [])
    assert not one.transfers.inbox.is_full
    cell.service.on_message(one.peer, Arrived(KEYS[2:]), [])
    assert one.transfers.inbox.is_full
    with pytest.raises(CodecError, match="2 places and 2 for guests has 2 and 3"):
        cell.service.on_message(one.peer, Arrived([b"x" * 16], True), [])


@pytest.mark.parametrize("caches", [True, False])
async def test_guests_are_kept_where_prefixes_are_cached(tmp_path: Path, caches: bool):
    cell = CellOfWorkers(tmp_path, enable_prefix_caching=caches)
    one = Worker(cell, "one", replace(INBOX, num_guests=2))
    one.simulated.inbox.put(KEYS[0], [0, 1, 2, 3])
    cell.service.on_message(one.peer, Arrived(KEYS[:1], True), [])
    cell.run()
    (row,) = one.rows
    assert type(row) is (Take if caches else Discard)
    assert row.key == KEYS[0]


async def test_a_guest_that_is_cached_already_is_said_to_be(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", replace(INBOX, num_guests=2))
    for _ in range(2):
        one.simulated.inbox.put(KEYS[0], [0, 1, 2, 3])
        cell.service.on_message(one.peer, Arrived(KEYS[:1], True), [])
        cell.run()
    assert [type(each) for each in one.rows] == [Take, Discard]
    assert one.discards[0].is_cached


async def test_a_guest_that_comes_twice_takes_no_place_of_the_cell(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", replace(INBOX, num_blocks=1, num_guests=2))
    inbox = one.transfers.inbox
    inbox.arrive(KEYS[:1], True)
    inbox.arrive(KEYS[1:2])
    inbox.rows(1)
    inbox.arrive(KEYS[:1], True)
    inbox.reserve(KEYS[2])
    inbox.finish(1)
    inbox.arrive(KEYS[2:3])
    assert inbox.has_arrived
    assert inbox.is_full
    inbox.rows(2)
    inbox.finish(2)
    assert not inbox.is_full


async def test_guests_without_a_block_leave_in_the_end(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", replace(INBOX, num_guests=2))
    pool = one.transfers.worker.pool
    owned = pool.try_allocate(pool.num_free)
    assert owned is not None
    one.transfers.inbox.arrive(KEYS[:1], True)
    assert not one.transfers.inbox.rows(1)
    for _ in range(int(TRANSFER_S / LOOK_S) + 1):
        one.transfers.inbox.look()
    assert one.transfers.inbox.rows(2) == [Discard(KEYS[0])]


async def test_an_inbox_that_contradicts_its_worker_is_refused(tmp_path: Path):
    cell, one = with_one(tmp_path)
    with pytest.raises(CodecError, match="a worker of this cell for cell t"):
        cell.service.on_message(one.peer, THEIRS, [])


async def test_a_leaving_scheduler_hands_blocks_over_first(tmp_path: Path):
    """Its workers stay, and become workers of other cells afterwards."""
    cell, one = with_one(tmp_path)
    far = Elsewhere(cell)
    Worker(cell, "two", minor=GUESTS_MINOR)
    leaving = asyncio.create_task(cell.moves.leave(30.0))
    await asyncio.sleep(0)
    settled = await go_on(cell, far)
    assert {each.worker for each in one.pushes} == {"far"}
    assert len(settled) >= len(PROMPT) // 4
    assert handed_over(cell) == ["r~1/0"]
    await leaving
    assert not one.running


async def test_a_leaving_scheduler_without_other_cells_waits_for_nothing(tmp_path: Path):
    cell, one = with_one(tmp_path)
    await cell.moves.leave(30.0)
    assert one.running
    cell.finish()
