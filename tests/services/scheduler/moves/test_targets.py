"""The worker that a sequence moves to: its choice, its room, and its admission of the sequence."""

from pathlib import Path

import numpy as np

from services.scheduler.moves.moves import RETRY_LOOKS
from shared.wire.messages import State
from tests.services.scheduler.moves.cell_of_workers import INBOX, CellOfWorkers, Worker
from tests.services.scheduler.moves.test_leaving import outcome, with_running


def prompt_of(number: int) -> np.ndarray:
    return np.arange(40, dtype=np.int32) + 50 * number


async def test_sequences_switch_only_as_far_as_the_target_has_slots(tmp_path: Path):
    """A newcomer takes one of the two slots while blocks are on their way."""
    cell, one = with_running(tmp_path, num=2)
    two = Worker(cell, "two", max_num_seqs=2)
    one.drain()
    cell.run(2, delivers=False)
    assert len(one.transfers.moves) == 2
    cell.ask("newcomer", prompt_of(9), max_tokens=60)
    cell.run(12)
    assert len(two.running) == 2
    assert len(one.running) == 1
    assert not cell.core.queues.waiting
    cell.finish()


async def test_a_sequence_is_admitted_where_its_blocks_are(tmp_path: Path):
    """The other worker is idle, and by its load alone the better choice."""
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two", num_blocks=200)
    one.set_state(one.peer.status.state)
    for number in (5, 6):
        cell.ask(f"beside{number}", prompt_of(number), max_tokens=100)
    cell.run(2)
    three = Worker(cell, "three")
    num_before = len(two.admitted)
    one.drain()
    cell.run(20)
    moved = [each for each in two.admitted[num_before:] if each[0] == "r0"]
    assert [num_cached >= 40 for _, num_cached in moved] == [True]
    assert not three.admitted
    cell.finish()


async def test_a_sequence_may_be_admitted_by_a_worker_whose_inbox_is_on_its_way(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    cell.run(2, delivers=False)
    (move,) = one.transfers.moves.values()
    two.set_state(State.NOT_READY)
    cell.moves._moves._switch(move)
    assert two.transfers.due
    three = Worker(cell, "three", inbox=None)
    cell.run(3)
    assert [name for name, _ in three.admitted] == ["r0"]
    cell.service.on_message(three.peer, INBOX, [])
    assert not two.transfers.due
    assert not two.transfers.num_meant


async def test_a_target_that_hangs_is_given_up_for_another(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two", num_blocks=200)
    cell.ask("hangs", prompt_of(5), max_tokens=60)
    one.set_state(one.peer.status.state)
    cell.service._plan()
    del cell.workers["two"]  # its plan stays in flight
    three = Worker(cell, "three")
    one.drain()
    for _ in range(4 * RETRY_LOOKS):
        cell.run(1, delivers=False)
        cell.workers["two"] = two
        cell.deliver()
        del cell.workers["two"]
        cell.look()
    assert [name for name, _ in three.admitted] == ["r0"]
    cell.workers["two"] = two
    cell.finish()


async def test_sequences_that_fit_no_target_hold_up_no_other(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", max_num_seqs=6, num_blocks=400)
    for number in range(5):
        cell.ask(f"long{number}", prompt_of(number), max_tokens=150)
    cell.ask("short", prompt_of(7), max_tokens=60)
    cell.run(20)
    assert len(one.running) == 6
    two = Worker(cell, "two", max_model_len=128)
    done = outcome("leaving", "done")
    one.drain()
    cell.run(20)
    assert [name for name, _ in two.admitted] == ["short"]
    assert outcome("leaving", "done") == done + 1
    cell.finish()
