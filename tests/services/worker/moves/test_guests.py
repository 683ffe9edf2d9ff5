"""Blocks that go to workers of other cells, whose schedulers do not count them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from shared.wire.messages import (
    GUESTS_MINOR,
    MOVES_MINOR,
    Arrived,
    Discard,
    Inbox,
    Settled,
    Take,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.worker.moves.worker import (
    MovingWorker,
    key_of,
    random_ids,
    scheduler,
    until,
    working,
)

Cells = tuple[MovingWorker, MovingWorker, FakePeer]


@pytest.fixture
async def cells(checkpoint: Path, tmp_path: Path) -> AsyncIterator[Cells]:
    """A worker of the cell ``s`` with two blocks, which has met one of the cell ``t``, and their
    first scheduler as the second worker sees it."""
    async with working(checkpoint, tmp_path, "a") as a, working(checkpoint, tmp_path, "b") as b:
        await a.prefill(random_ids(37, 150), 37, [0, 1, 2], 0, 0)
        a.meet(b, are_guests=True)
        b.home, elsewhere = scheduler(name="t"), scheduler()
        b.others = [elsewhere]
        yield a, b, elsewhere


async def come(b: MovingWorker, num: int) -> list[bool]:
    """For each message about ``num`` blocks, whether they are guests."""
    found: list[Arrived] = []

    def is_over() -> bool:
        found.extend(each for each, _ in b.home.take(Arrived))
        return sum(len(each.keys) for each in found) >= num

    await until(is_over)
    return [each.are_guests for each in found]


async def test_guests_are_told_apart_and_settle_at_their_origin(cells: Cells) -> None:
    a, b, elsewhere = cells
    await a.push(b, [0, 1])
    assert set(await come(b, 2)) == {True}
    assert not elsewhere.take(Settled)
    await b.run(Take(key_of(0), 5))
    await b.run(Discard(key_of(1), is_cached=True))
    assert [each for each, _ in elsewhere.take(Settled)] == [
        Settled([key_of(0)]),
        Settled([key_of(1)]),
    ]
    assert b.bytes_of(5) == a.bytes_of(0)
    await a.push(b, [0], first=2)
    await come(b, 1)
    await b.run(Discard(key_of(2)))
    assert not elsewhere.take(Settled)


async def test_a_guest_settles_at_each_of_its_origins(cells: Cells) -> None:
    """Two cells leave together, with one system prompt."""
    a, b, elsewhere = cells
    third = scheduler(name="u")
    b.others.append(third)
    for home in (elsewhere, third):
        a.home = home
        await a.push(b, [0])
        await come(b, 1)
    await b.run(Take(key_of(0), 5))
    for home in (elsewhere, third):
        assert [each for each, _ in home.take(Settled)] == [Settled([key_of(0)])]


async def test_guests_take_no_place_of_the_own_cell(cells: Cells) -> None:
    a, b, _ = cells
    inbox = b.moves._inbox
    inbox.num_guests = 1
    await a.push(b, [0])
    await come(b, 1)
    await a.push(b, [1], first=1)
    a.meet_again(b)
    await a.push(b, [0, 1], first=2)
    assert set(await come(b, 2)) == {False}
    assert b.num_full == 3
    assert not inbox.discard(key_of(1))
    inbox.expect(inbox.num_blocks - 2)


async def test_all_schedulers_learn_of_the_inbox(cells: Cells) -> None:
    _, b, elsewhere = cells
    old = scheduler(MOVES_MINOR, "u")
    b.others.append(old)
    b.moves.on_attach(b.home)
    own, theirs = b.inbox, elsewhere.take(Inbox)[0][0]
    assert own == theirs
    assert (own.cell, own.num_guests) == ("t", own.num_blocks // 2)
    assert not old.got
    later = scheduler(name="v")
    b.moves.on_up(later)
    assert later.take(Inbox)[0][0] == own


async def test_a_cell_that_knows_no_guests_gets_none(cells: Cells) -> None:
    a, b, elsewhere = cells
    b.home = scheduler(GUESTS_MINOR - 1, "t")
    b.moves.on_attach(b.home)
    assert b.inbox.num_guests == elsewhere.take(Inbox)[0][0].num_guests == 0
    await a.push(b, [0])
    a.meet_again(b)
    await a.push(b, [1], first=1)
    assert await come(b, 1) == [False]
    assert b.num_full == 1
