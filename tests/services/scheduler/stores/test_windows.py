"""Stores of layers with windows: the blocks that a sequence needs to begin after others."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.scheduler.sequence import WaitReason
from services.scheduler.stores.index import group_key
from shared.wire.messages import EVERY_LAYER, Capacity, Group, Load, StepPlan
from tests.services.scheduler.stores.storing_worker import SimulatedStore
from tests.services.scheduler.stores.test_stores import LONG, Mesh, Worker, cached_of, rows_of

GROUPS = Group(), Group(100), Group(8)
CAPACITY = Capacity(200, 16, 4, 128, 1000, 1000, groups=GROUPS)
FIRST = 0, 4, 8  # block of each group that 192 ids need, with windows rounded up


def restarted(mesh: Mesh, capacity: Capacity = CAPACITY) -> Worker:
    """A worker's next process, after a request with the prompt ``LONG``."""
    store = SimulatedStore("one", 200, 1)
    worker = Worker(mesh, "one", store, capacity)
    mesh.ask("r", LONG)
    worker.run()
    worker.die()
    return Worker(mesh, "two", store, capacity)


def hashes_of(mesh: Mesh) -> list[bytes]:
    """Of the full blocks of the only sequence."""
    (sequence,) = mesh.core.sequences.values()
    return [sequence.block_hash(number, 16) for number in range(12)]


def loaded(plans: list[StepPlan]) -> list[bytes]:
    return [each.key for each in rows_of(plans, Load)]


async def test_of_a_window_the_last_blocks_are_loaded(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    worker = restarted(mesh)
    mesh.ask("s", LONG)
    hashes = hashes_of(mesh)
    plans = worker.run()
    assert cached_of(plans) == [192]
    wanted = [group_key(each, group) for group in range(3) for each in hashes[FIRST[group] :]]
    assert loaded(plans) == wanted
    (admit,) = plans[0].admit
    null = CAPACITY.num_blocks
    for blocks, first in zip([admit.blocks, *admit.more_blocks], FIRST, strict=True):
        assert [block == null for block in blocks[:12]] == [True] * first + [False] * (12 - first)
    mesh.ask("t", LONG)
    plans = worker.run()
    assert cached_of(plans) == [192], "the worker has a keep point there"
    assert not loaded(plans)


async def test_layers_may_all_have_windows(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    worker = restarted(mesh, replace(CAPACITY, groups=GROUPS[1:]))
    mesh.ask("s", LONG)
    hashes = hashes_of(mesh)
    plans = worker.run()
    assert cached_of(plans) == [192]
    assert loaded(plans) == [*hashes[4:], *(group_key(each, 1) for each in hashes[8:])]


async def test_a_killed_workers_stream_goes_on_from_its_last_keep_point(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    first = Worker(mesh, "one", SimulatedStore("one", 200, 1), CAPACITY)
    mesh.ask("r", LONG, max_tokens=20)
    first.run(num=8)
    second = Worker(mesh, "two", SimulatedStore("two", 200, 1), CAPACITY)
    first.die()
    plans = second.run()
    assert not mesh.core.sequences
    assert cached_of(plans) == [192]
    assert len(loaded(plans)) == 12 + 8 + 4


async def test_blocks_of_the_cache_are_not_loaded(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    worker = restarted(mesh)
    mesh.ask("q", LONG[:100])
    worker.run()  # a store has no last blocks of 96 ids: they are computed
    mesh.ask("s", LONG)
    hashes = hashes_of(mesh)
    plans = worker.run()
    assert cached_of(plans) == [192]
    first = 6, 6, 8
    wanted = [group_key(each, group) for group in range(3) for each in hashes[first[group] :]]
    assert loaded(plans) == wanted
    (state,) = mesh.core.workers.values()
    assert state.pool.num_owned == 0


async def test_a_hit_ends_where_a_store_has_the_last_blocks(tmp_path: Path) -> None:
    """Without one of them, at the keep point before."""
    mesh = Mesh(tmp_path)
    store = SimulatedStore("one", 200, 1)
    for name, num_ids in (("one", 100), ("two", 200)):
        worker = Worker(mesh, name, store, CAPACITY)
        mesh.ask(name, LONG[:num_ids])
        if name == "two":
            hashes = hashes_of(mesh)
        worker.run()
        worker.die()
    lost = group_key(hashes[8], 2)
    store.records = {place: each for place, each in store.records.items() if each[0] != lost}
    mesh = Mesh(tmp_path)
    worker = Worker(mesh, "three", store, CAPACITY)
    mesh.ask("s", LONG)
    plans = worker.run()
    assert cached_of(plans) == [96]
    first = 0, 0, 4
    wanted = [group_key(each, group) for group in range(3) for each in hashes[first[group] : 6]]
    assert loaded(plans) == wanted
    assert lost in {key for key, _ in store.records.values()}, "it is saved again"


async def test_a_sequence_without_room_for_the_last_blocks_is_computed(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path)
    capacity = replace(CAPACITY, num_blocks=40, max_num_batched_tokens=16, groups=GROUPS[:2])
    worker = restarted(mesh, capacity)
    mesh.ask("q", LONG + 1, max_tokens=100)
    worker.run(num=15)
    mesh.ask("s", LONG)
    plans = worker.run(num=400)
    assert cached_of(plans)[0] == 0
    assert not mesh.core.sequences


async def test_a_sequence_makes_no_keep_point_before_its_loaded_blocks(tmp_path: Path) -> None:
    """It goes on where it was preempted, after more blocks than its prompt has."""
    mesh = Mesh(tmp_path)
    first = Worker(mesh, "one", SimulatedStore("one", 200, 1), CAPACITY)
    mesh.ask("r", LONG, max_tokens=150)
    first.run(num=110)
    (state,), (sequence,) = mesh.core.workers.values(), mesh.core.sequences.values()
    state.remove(sequence)
    mesh.core.queues.put_back(sequence, WaitReason.KV_BLOCKS)
    first.run(num=3)
    second = Worker(mesh, "two", SimulatedStore("two", 200, 1), CAPACITY)
    first.die()
    assert cached_of(second.run()) == [304]
    mesh.ask("s", LONG)
    assert cached_of(second.run()) == [192]


@pytest.mark.parametrize("groups", [EVERY_LAYER, GROUPS], ids=["whole", "windows"])
async def test_blocks_that_are_loaded_in_a_reset_are_found_by_nobody(
    groups: tuple[Group, ...], tmp_path: Path
) -> None:
    mesh = Mesh(tmp_path)
    worker = restarted(mesh, replace(CAPACITY, groups=groups))
    mesh.ask("s", LONG, max_tokens=30)
    worker.run(num=1)
    mesh.service._plan()
    ((plan, (ids, *_)),) = worker.peer.take(StepPlan)
    assert loaded([plan])
    mesh.service.commands()["reset_prefix_cache"]()
    worker.answer(plan, ids)
    worker.run(num=5)
    mesh.ask("t", LONG)
    assert cached_of(worker.run()) == [0]
