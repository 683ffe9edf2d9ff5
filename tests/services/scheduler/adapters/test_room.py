"""The bound on different adapters of a worker's running sequences."""

from collections import Counter
from typing import Any
from weakref import ref

import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.adapters.room import PATIENCE, AdapterRoom
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import WaitReason
from shared.wire.messages import (
    Capacity,
    SamplingParams,
)
from tests.services.scheduler.adapters.schedules import DIGESTS, AdapterMesh
from tests.services.scheduler.schedules import run_schedule
from tests.services.scheduler.simulated_worker import SimulatedWorker

A, B, C, D = DIGESTS
CAPACITY = Capacity(num_blocks=256, block_size=4, max_num_seqs=8, max_num_batched_tokens=64,
                    max_model_len=128)  # fmt: skip
LENGTH = 20


class Cell:
    """A scheduler with one worker of two adapters at once."""

    def __init__(self, max_adapters: int = 2) -> None:
        self.core = Scheduler(1000, 10)
        self.reported = {A, B, C}
        self.worker = SimulatedWorker(CAPACITY)
        room = AdapterRoom(self.reported, max_adapters, self.core.queues.waiting.__contains__)
        self.core.add_worker("w", CAPACITY, 100, [room])
        self.num = 0

    def add(self, adapter: str, **fields: Any) -> str:
        self.num += 1
        name, max_tokens = f"{self.num}", fields.pop("max_tokens", LENGTH)
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        prompt = range(100 * self.num, 100 * self.num + 3)
        add_one(self.core, name, prompt, params, self.num, adapter=adapter, **fields)
        return name

    def step(self) -> None:
        if planned := self.core.plan("w"):
            self.core.absorb("w", *self.worker.step(planned))

    def running(self) -> Counter[str]:
        return Counter(each.options.adapter for each in self.core.workers["w"].running.values())

    def waits(self, name: str) -> bool:
        return any(each.request == name for each in self.core.queues)


def test_any_number_of_sequences_share_an_adapter_and_others_pass_one_without_room():
    cell = Cell()
    for adapter in (A, B, C, A, "", A):
        cell.add(adapter)
    cell.step()
    assert cell.running() == Counter({A: 3, B: 1, "": 1})
    assert cell.core.wait_reason == WaitReason.ADAPTER
    while cell.core.sequences:
        cell.step()


def test_a_sequence_runs_only_where_its_adapter_is():
    cell = Cell()
    cell.reported.clear()
    cell.add("")
    with pytest.raises(Exception, match="no worker has both"):
        cell.add(A)
    cell.reported.add(A)
    name = cell.add(A)
    cell.step()
    assert not cell.waits(name)


@pytest.mark.parametrize("max_adapters", [1, 2])
def test_a_stream_of_requests_for_others_starves_no_adapter(max_adapters: int):
    """It waits for its patience, and then for one running text."""
    cell, num_steps = Cell(max_adapters), 0
    crowd = [A, B][:max_adapters]
    for adapter in crowd:
        cell.add(adapter)
    cell.step()
    name = cell.add(C)
    while cell.waits(name):
        for adapter in crowd:
            if cell.running()[adapter] < 3:
                cell.add(adapter)
        cell.step()
        num_steps += 1
        assert num_steps <= PATIENCE + 2 * LENGTH
    assert num_steps > PATIENCE
    for _ in range(3 * LENGTH):
        cell.step()
    assert not cell.core.sequences, "those behind it run afterwards"


def test_a_sequence_that_starved_is_not_kept_after_its_end():
    """Its images count in the scheduler's memory."""
    cell = Cell(max_adapters=1)
    for adapter in (A, B):
        cell.add(adapter, max_tokens=2 * PATIENCE)
    for _ in range(2 * PATIENCE - 2):
        cell.step()
    [room] = cell.core.workers["w"].resources
    starved = ref(cell.core.sequences["2", 1])
    assert room.starved is starved()
    cell.core.cancel(("2", 1))
    cell.core.take_ended()
    assert starved() is None


def test_an_earlier_priority_takes_the_adapter_of_a_later_one():
    cell = Cell(max_adapters=1)
    cell.add(A, priority=1, max_tokens=100)
    for _ in range(3):
        cell.step()
    name = cell.add(B, priority=-1)
    cell.step()
    assert not cell.waits(name)
    assert cell.running() == Counter({B: 1})


def test_a_client_that_does_not_read_gives_its_adapter_back():
    cell = Cell(max_adapters=1)
    slow = cell.add(A, max_tokens=100)
    cell.core.sequences[slow, 1].max_emitted = 2
    for _ in range(4):
        cell.step()
    name = cell.add(B)
    cell.step()
    assert not cell.waits(name)
    assert cell.waits(slow)


def test_a_client_that_does_not_read_loses_nothing_that_would_help_no_one():
    cell = Cell(max_adapters=1)
    slow = cell.add("", max_tokens=100)
    cell.add(A, max_tokens=100)
    cell.core.sequences[slow, 1].max_emitted = 2
    for _ in range(4):
        cell.step()
    name = cell.add(B)
    cell.step()
    assert cell.waits(name)
    assert not cell.waits(slow)


def test_the_reason_to_wait_is_the_adapter_on_a_worker_that_lacks_it():
    cell = Cell()
    other = AdapterRoom(set(), 2, cell.core.queues.waiting.__contains__)
    cell.core.add_worker("other", CAPACITY, 100, [other])
    cell.add(A)
    cell.core.plan("other")
    assert cell.core.wait_reason == WaitReason.ADAPTER


def test_an_adapter_is_held_until_no_plan_in_flight_names_it():
    cell = Cell(max_adapters=1)
    first = cell.add(A)
    planned = cell.core.plan("w")
    assert planned is not None
    cell.core.cancel((first, 1))
    second = cell.add(B)
    assert not cell.core.workers["w"].has_room_for(cell.core.sequences[second, 1])
    cell.core.absorb("w", *cell.worker.step(planned))
    cell.step()
    assert not cell.waits(second)


def test_random_schedules_keep_the_bound_and_end():
    met: Counter[str] = Counter()
    for number in range(60):
        mesh = run_schedule(number, AdapterMesh)
        assert isinstance(mesh, AdapterMesh)
        met.update(
            shared=mesh.num_shared,
            full=mesh.num_full,
            kept=mesh.num_kept,
            forgotten=mesh.num_forgotten,
            abandoned=mesh.num_abandoned,
            requeues=mesh.core.num_requeues,
        )
    assert len(met) == 6
    assert all(met.values()), met
