"""Sequences of several API keys are admitted in turn."""

import msgspec
import numpy as np

from benchmarks.harness.sequences import generate_one
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

NO_IDS = np.zeros(0, np.int32)


class Bench:
    """One worker with ``num_slots``; ``admitted`` has the names in the order of admission."""

    def __init__(self, num_slots: int, budget: int = 512) -> None:
        capacity = Capacity(
            num_blocks=4000,
            block_size=16,
            max_num_seqs=num_slots,
            max_num_batched_tokens=budget,
            max_model_len=4096,
        )
        self.core = Scheduler(1000, 10)
        self.core.add_worker("w", capacity)
        self.worker = SimulatedWorker(capacity)
        self.admitted: list[str] = []
        self._num = 0

    def add(self, owner: str, num: int, *, priority: int = 0, max_tokens: int = 4) -> None:
        for _ in range(num):
            self._num += 1
            params = SamplingParams(0, max_tokens=max_tokens)
            generate = generate_one(f"{owner}{self._num}", params)
            options = write_options(RequestOptions(priority=priority, owner=owner))
            prompt = np.arange(20 * self._num, 20 * self._num + 10, dtype=np.int32)
            generate = msgspec.structs.replace(generate, options=options)
            self.core.add(Arrival(generate, prompt, NO_IDS, 0, float(self._num)))

    def step(self) -> None:
        planned = self.core.plan("w")
        assert planned is not None
        self.admitted += [each.request for each in planned.newcomers]
        self.core.absorb("w", *self.worker.step(planned))

    def run(self) -> list[str]:
        while self.core.sequences:
            self.step()
        return self.admitted


def test_one_that_has_nothing_goes_before_all_that_wait_of_another():
    bench = Bench(num_slots=1)
    bench.add("a", 6)
    bench.step()
    bench.add("b", 1)
    assert bench.run() == ["a1", "b7", "a2", "a3", "a4", "a5", "a6"]


def test_owners_take_turns_and_their_own_keep_their_order():
    bench = Bench(num_slots=1)
    bench.add("a", 3)
    bench.add("b", 2)
    bench.add("c", 1)
    assert bench.run() == ["a1", "b4", "c6", "a2", "b5", "a3"]


def test_a_free_slot_goes_to_the_owner_with_the_fewest():
    bench = Bench(num_slots=4)
    bench.add("a", 8, max_tokens=50)
    bench.add("b", 8, max_tokens=50)
    bench.step()
    assert sorted(bench.admitted) == ["a1", "a2", "b10", "b9"]


def test_a_later_priority_of_one_gives_way_to_an_earlier_one_of_another():
    bench = Bench(num_slots=1)
    bench.add("a", 1)
    bench.step()
    bench.add("b", 1, priority=5)
    bench.add("a", 2)
    assert bench.run() == ["a1", "a3", "a4", "b2"]


def test_one_of_a_later_priority_that_has_waited_long_is_of_the_first_level():
    bench = Bench(num_slots=1)
    bench.add("a", 1, priority=1)
    for _ in range(12):
        bench.add("b", 1)
    assert bench.run().index("a1") == 9
