"""Sequences of models with windows or states move with a keep point."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace

from services.scheduler.moves.points import ComingPoints, PointShape, key_of
from services.scheduler.worker_state import WorkerState
from shared.errors import CodecError
from shared.wire.messages import (
    MOVED_POINTS_MINOR,
    Arrived,
    Capacity,
    Group,
    Heartbeat,
    Keep,
    Part,
    State,
)
from tests.services.scheduler.moves.cell_of_workers import CAPACITY, INBOX, CellOfWorkers, Worker
from tests.services.scheduler.moves.test_leaving import outcome, recomputed
from tests.services.scheduler.moves.test_other_cells import OTHER, Elsewhere, handed_over

SIZE = CAPACITY.block_size
INTERVAL = 8
KINDS: dict[str, dict[str, Any]] = {
    "a window": {"groups": (Group(), Group(8)), "num_blocks": 128},
    "two windows": {"groups": (Group(), Group(8), Group(20)), "num_blocks": 192},
    "windows alone": {"groups": (Group(12),)},
    "states": {"num_states": 8},
    "states and drafts": {"num_states": 8, "num_speculative_tokens": 2},
    "windows and states": {"num_states": 8, "groups": (Group(), Group(8)), "num_blocks": 128},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_intervals() -> Iterator[None]:
    with (
        patch("shared.wire.kv_groups.COPY_INTERVAL", INTERVAL),
        patch("shared.wire.kv_groups.READ_AT_ONCE", SIZE),
        patch("services.scheduler.moves.move.NEAR_TOKENS", 2),
    ):
        yield


def worker_of(cell: CellOfWorkers, name: str, kind: str, **changes: Any) -> Worker:
    capacity = KINDS[kind]
    of_worker = {*CAPACITY.__struct_fields__, "minor"}
    own = {key: changes.pop(key) for key in [*changes] if key in of_worker}
    inbox = replace(INBOX, num_pieces=3 * ("num_states" in capacity), **changes)
    return Worker(cell, name, inbox, **(capacity | own))


def lag_of(worker: Worker) -> int:
    """The known ids of the sequence moved last that are not in its hit."""
    admits = [row for plan in worker.plans for row in plan.admit]
    return admits[-1].num_ids - admits[-1].num_cached


def begun(cell: CellOfWorkers, kind: str, num_steps: int = 30, **changes: Any) -> Worker:
    one = worker_of(cell, "one", kind, **changes)
    cell.ask("r", max_tokens=160)
    cell.run(num_steps)
    assert len(one.running) == 1
    assert len(one.running[0].emitted) > 8
    return one


@each_kind
async def test_a_sequence_moves_with_a_point_at_the_end_of_its_computed_part(
    kind: str, tmp_path: Path
) -> None:
    cell = CellOfWorkers(tmp_path)
    one = begun(cell, kind)
    two = worker_of(cell, "two", kind)
    done, again = outcome("leaving", "done"), recomputed("moved")
    one.drain()
    cell.run(20)
    assert not one.running
    assert outcome("leaving", "done") == done + 1
    assert lag_of(two) <= 2 * INTERVAL
    assert recomputed("moved") == again
    assert two.simulated.num_parts_taken
    cell.finish()


@each_kind
async def test_an_old_point_is_followed_by_the_newest_while_the_sequence_waits(
    kind: str, tmp_path: Path
) -> None:
    """The blocks need many steps."""
    cell = CellOfWorkers(tmp_path)
    one = begun(cell, kind)
    two = worker_of(cell, "two", kind)
    one.drain()
    for _ in range(30):
        cell.run(1, delivers=False)
    assert one.running
    cell.run(30)
    assert not one.running
    assert lag_of(two) <= INTERVAL + 4
    cell.finish()


@each_kind
async def test_a_sequence_moves_within_its_prompt(kind: str, tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    changes = {"num_blocks": 400, "max_num_batched_tokens": 16}
    one = worker_of(cell, "one", kind, **changes)
    cell.ask("r", np.arange(200, dtype=np.int32), max_tokens=20)
    cell.run(4)
    two = worker_of(cell, "two", kind, **changes)
    (sequence,) = one.running
    one.drain()
    cell.run(20)
    assert not one.running
    ((_, num_cached),) = two.admitted
    assert 32 <= num_cached < 200
    cell.finish()
    assert sequence.num_preemptions == 0


@each_kind
async def test_a_short_sequence_moves(kind: str, tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    one = worker_of(cell, "one", kind)
    cell.ask("r", np.arange(6, dtype=np.int32), max_tokens=20)
    cell.run(2)
    worker_of(cell, "two", kind)
    one.drain()
    cell.run(10)
    assert not one.running
    cell.finish()


@each_kind
async def test_a_prefill_worker_hands_over_the_point_of_the_prompt(
    kind: str, tmp_path: Path
) -> None:
    cell = CellOfWorkers(tmp_path)
    with patch("services.scheduler.moves.roles.LONG_TOKENS", 16):
        one = worker_of(cell, "one", kind, role="prefill")
        two = worker_of(cell, "two", kind, role="decode")
        done, again = outcome("role", "done"), recomputed("moved")
        cell.ask("r", num_choices=2)
        cell.run()
    assert {name for name, _ in one.admitted} == {"r"}
    assert outcome("role", "done") == done + 2
    assert recomputed("moved") - again <= 2 * INTERVAL
    assert all(num_cached >= 32 for _, num_cached in two.admitted)
    cell.finish()


async def test_a_sequence_without_copies_of_its_state_makes_them_for_the_move(
    tmp_path: Path,
) -> None:
    cell = CellOfWorkers(tmp_path)
    one = begun(cell, "states")
    (sequence,) = one.running
    pool = one.transfers.worker.pool
    assert sequence.allocated.to_state is not None
    pool.free_state(sequence.allocated.to_state)
    sequence.allocated.to_state = None
    one.transfers.worker.blocks.rows.append(Keep(sequence.allocated.slot, None))
    two = worker_of(cell, "two", "states")
    one.drain()
    cell.run(30)
    assert not one.running
    assert lag_of(two) <= 2 * INTERVAL
    cell.finish()


async def test_the_only_copy_of_a_state_moves_and_is_not_overwritten(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    one = begun(cell, "states", num_states=1)
    two = worker_of(cell, "two", "states", num_states=1)
    one.drain()
    cell.run(30)
    assert not one.running
    assert lag_of(two) <= 2 * INTERVAL
    cell.finish()


async def test_a_point_that_the_source_evicts_is_followed_by_another(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    one = begun(cell, "a window")
    two = worker_of(cell, "two", "a window")
    one.drain()
    cell.run(1, delivers=False)
    (move,) = one.transfers.moves.values()
    while move.point is None:
        cell.run(1)
    first = move.point
    one.transfers.worker.pool.forget(first)
    cell.run(20)
    assert move.point is not first
    assert lag_of(two) <= 2 * INTERVAL
    cell.finish()


@each_kind
async def test_the_last_point_that_the_source_evicts_is_followed_by_another(
    kind: str, tmp_path: Path
) -> None:
    """Without another copy of its state the sequence goes on where it is."""
    cell = CellOfWorkers(tmp_path)
    one = worker_of(cell, "one", kind, max_num_batched_tokens=16, num_blocks=400)
    cell.ask("r", np.arange(200, dtype=np.int32), max_tokens=20)
    cell.run(6)
    two = worker_of(cell, "two", kind, max_num_batched_tokens=16, num_blocks=400)
    one.drain()
    cell.run(1)
    (move,) = one.transfers.moves.values()
    while not move.is_last:
        cell.run(1)
    assert move.point is not None
    one.transfers.worker.pool.forget(move.point)
    two.transfers.points.forget(move.point.block_hash)
    given_up = outcome("leaving", "given_up")
    cell.run(20)
    if "states" in kind:
        assert outcome("leaving", "given_up") == given_up + 1
    else:
        ((_, num_cached),) = two.admitted
        assert num_cached >= 32
    cell.finish()


async def test_a_point_that_the_target_evicts_is_pushed_again(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    one = begun(cell, "states")
    two = worker_of(cell, "two", "states")
    one.drain()
    (sequence,) = one.running
    while not sequence.allocated.is_held:
        cell.run(1)
    (move,) = one.transfers.moves.values()
    assert move.point is not None
    two.transfers.points.forget(move.point.block_hash)
    cell.run(20)
    assert lag_of(two) <= 2 * INTERVAL
    assert len([each for each in one.pushes if each.part is not None]) > 3
    cell.finish()


async def test_a_held_sequence_goes_on_if_its_last_point_does_not_come(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    one = begun(cell, "states")
    worker_of(cell, "two", "states")
    one.drain()
    for _ in range(20):
        cell.run(1, delivers=False)
    (sequence,) = one.running
    cell.on_the_way.clear()
    given_up = outcome("leaving", "given_up")
    while outcome("leaving", "given_up") == given_up:
        cell.run(1, delivers=False)
        cell.look()
    assert not sequence.allocated.is_held
    cell.run()
    cell.look(40)
    cell.finish()


@each_kind
async def test_a_point_goes_to_another_cell(kind: str, tmp_path: Path) -> None:
    """Its scheduler knows of no move, only of the parts."""
    cell, other = CellOfWorkers(tmp_path), CellOfWorkers(tmp_path)
    cell.tokenizer.status = Heartbeat(State.READY, "", 0, 0, overview=OTHER)
    one = begun(cell, kind, minor=MOVED_POINTS_MINOR)
    inbox = replace(INBOX, num_guests=50, num_pieces=one.transfers.message.num_pieces)
    (sequence,) = one.running
    far = Elsewhere(cell, replace(inbox, cell="t"))
    two = worker_of(other, "two", kind, num_guests=50)
    one.drain()
    while not handed_over(cell):
        cell.run(1, delivers=False)
        for _, key, content, part in cell.on_the_way:
            two.simulated.inbox.put(key, content)
            parts = [] if part is None else [part]
            other.service.on_message(two.peer, Arrived([key], True, parts), [])
        other.run()
        far.settle()
        await asyncio.sleep(0)
    other.ask("r", sequence.known_ids(), max_tokens=20)
    other.run()
    assert lag_of(two) <= 2 * INTERVAL
    assert two.simulated.num_parts_taken
    other.finish()


# --- parts --------------------------------------------------------------------------------------


def points_of(num_pieces: int = 2, **changes: Any) -> tuple[ComingPoints, PointShape, WorkerState]:
    values = {each: getattr(CAPACITY, each) for each in CAPACITY.__struct_fields__}
    capacity = Capacity(**(values | {"groups": (Group(), Group(8)), "num_states": 2} | changes))
    worker = WorkerState("w/0", capacity, True, {}, 0.2, 0.5)
    shape = PointShape(capacity, num_pieces)
    return ComingPoints(worker, shape), shape, worker


NAME = bytes(range(16))


def test_parts_are_one_point_once_all_are_there() -> None:
    points, shape, worker = points_of()
    parts = shape.parts(NAME, 6)
    assert [(each.group, each.number) for each in parts] == [
        *((1, 4), (1, 5)),
        *((None, 0), (None, 1)),
    ]
    numbers = []
    for part in reversed(parts):
        assert NAME not in worker.pool.keep_points
        assert not points.has(part)
        numbers.append(points.take(part))
        assert points.has(part)
    (point,) = worker.pool.keep_points.values()
    assert point is worker.pool.keep_points[NAME]
    assert (point.num_blocks, point.tables, point.state) == (
        6,
        [[numbers[3], numbers[2]]],
        numbers[0],
    )
    assert numbers[0] == numbers[1]
    assert [shape.number_in(point, each) for each in parts] == numbers[::-1]
    assert worker.pool.num_free == worker.pool.num_blocks
    assert worker.pool.num_free_states == 1
    worker.pool.forget(point)
    assert worker.pool.num_free_states == 2
    assert not points.has(parts[0])


def test_a_part_that_is_evicted_comes_again() -> None:
    points, shape, worker = points_of()
    first, second, *pieces = shape.parts(NAME, 6)
    for part in (first, pieces[0]):
        points.take(part)
    worker.pool.reset_cache()
    assert not points.has(first)
    for part in (second, pieces[1]):
        points.take(part)
    assert NAME not in worker.pool.keep_points
    for part in (pieces[0], first):
        points.take(part)
    assert [*worker.pool.keep_points] == [NAME]
    assert worker.pool.num_free_states == 1


def test_parts_of_a_point_that_may_be_wrong_are_forgotten() -> None:
    points, shape, worker = points_of()
    for part in shape.parts(NAME, 6)[1:]:
        points.take(part)
    points.forget(NAME)
    assert not worker.pool.keep_points
    assert worker.pool.num_free_states == 2


def test_without_a_free_copy_a_piece_waits() -> None:
    points, shape, worker = points_of()
    while worker.pool.take_state() is not None:
        pass
    assert points.take(shape.parts(NAME, 6)[-1]) is None
    assert not worker.pool.keep_points


@pytest.mark.parametrize(
    "part",
    [
        Part(NAME, 6, 3, 1),  # behind the window
        Part(NAME, 6, 6, 1),
        Part(NAME, 6, 5, 0),  # has no window
        Part(NAME, 6, 5, 2),
        Part(NAME, 6, 2),  # there are two pieces
        Part(NAME, 5, 0),  # no state is copied there
        Part(NAME, 0, 0),
        Part(NAME, 1 << 20, 0),
    ],
    ids=str,
)
async def test_a_wrong_part_is_refused(part: Part, tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    kind = KINDS["windows and states"]
    one = Worker(cell, "one", replace(INBOX, num_pieces=2), **kind)
    good = Part(NAME, 6, 5, 1)
    for key, each in ((key_of(part), part), (NAME, good)):
        with pytest.raises(CodecError, match="no part of a keep point is"):
            cell.service.on_message(one.peer, Arrived([key], parts=[each]), [])
    with pytest.raises(CodecError, match="1 keys with 2 parts"):
        cell.service.on_message(one.peer, Arrived([NAME], parts=2 * [good]), [])


async def test_states_need_pieces(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    for capacity, num_pieces in (({"num_states": 4}, 0), ({}, 2)):
        one = Worker(cell, "one", None, **capacity)
        with pytest.raises(CodecError, match=f"an Inbox of states with {num_pieces} pieces"):
            cell.service.on_message(one.peer, replace(INBOX, num_pieces=num_pieces), [])
