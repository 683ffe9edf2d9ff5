"""Messages about inboxes that do not fit, and the counts of moves."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.scheduler.moves.inbox import InboxPlaces
from services.scheduler.moves.points import ComingPoints, PointShape
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.wire.messages import Arrived, Capacity
from tests.services.scheduler.moves.cell_of_workers import CAPACITY, INBOX, CellOfWorkers, Worker

KEYS = [bytes([number]) * 16 for number in range(8)]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (INBOX, "has sent one"),
        (Arrived(KEYS), "an inbox of 4 places and 0 for guests has 8 and 0"),
    ],
)
async def test_a_message_that_does_not_fit_is_refused(tmp_path: Path, message: object, text: str):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", replace(INBOX, num_blocks=4))
    with pytest.raises(CodecError, match=text):
        cell.service.on_message(one.peer, message, [])  # type: ignore[arg-type]


async def test_blocks_need_bytes_and_an_inbox(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", None)
    with pytest.raises(CodecError, match="without an Inbox"):
        cell.service.on_message(one.peer, Arrived(KEYS), [])
    with pytest.raises(CodecError, match="0 bytes"):
        cell.service.on_message(one.peer, replace(INBOX, block_bytes=0), [])


async def test_blocks_that_nobody_waits_for_are_discarded(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one")
    for key in KEYS:
        one.simulated.inbox.put(key, [])
    cell.service.on_message(one.peer, Arrived(KEYS), [])
    cell.run()
    assert [each.key for each in one.discards] == KEYS
    cell.finish()


@pytest.mark.parametrize("capacity", [{"num_stages": 2}, {"num_states": 0}], ids=str)
async def test_no_sequence_of_stages_or_without_copies_of_states_moves(
    capacity: dict[str, int], tmp_path: Path
):
    cell = CellOfWorkers(tmp_path)
    inbox = replace(INBOX, num_pieces=2 * ("num_states" in capacity))
    one = Worker(cell, "one", inbox, **capacity)
    cell.ask("r", max_tokens=20)
    cell.run(6)
    Worker(cell, "two", inbox, **capacity)
    one.drain()
    cell.run(10)
    assert one.running
    cell.finish()


def inbox_of(num_blocks: int = 8) -> InboxPlaces:
    capacity: Capacity = replace(CAPACITY, num_blocks=num_blocks)
    worker = WorkerState("w/0", capacity, True, {}, 0.2, 0.5)
    points = ComingPoints(worker, PointShape(capacity, 0))
    return InboxPlaces(worker, replace(INBOX, num_blocks=4), points)


def test_a_key_is_free_once_the_row_that_took_it_has_run():
    inbox = inbox_of()
    inbox.reserve(KEYS[0])
    inbox.arrive(KEYS[:1])
    assert len(inbox.rows(1)) == 1
    assert inbox.find(KEYS[0]) is not None
    inbox.finish(1)
    assert inbox.find(KEYS[0]) is None
    assert inbox.worker.index.find(KEYS[0]) is not None
    assert inbox.worker.pool.num_free == 8


def test_a_block_that_comes_twice_is_discarded_afterwards():
    inbox = inbox_of()
    inbox.reserve(KEYS[0])
    inbox.arrive(KEYS[:1])
    inbox.rows(1)
    inbox.arrive(KEYS[:1])
    assert not inbox.rows(2)
    inbox.finish(1)
    assert [type(each).__name__ for each in inbox.rows(2)] == ["Discard"]


def test_blocks_wait_for_a_free_one_and_take_none_from_sequences():
    inbox = inbox_of(num_blocks=2)
    owned = inbox.worker.pool.try_allocate(2)
    assert owned is not None
    inbox.reserve(KEYS[0])
    inbox.arrive(KEYS[:1])
    assert not inbox.rows(1)
    inbox.worker.pool.free(owned[:1])
    assert len(inbox.rows(2)) == 1
