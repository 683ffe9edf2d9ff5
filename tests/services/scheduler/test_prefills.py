"""Short prompts next to long ones, and limits on partial prefills."""

from typing import Any

import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.prefills import PrefillLimits
from services.scheduler.scheduler import Planned, Scheduler
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=4000, block_size=16, max_num_seqs=32, max_num_batched_tokens=512,
                    max_model_len=32_000)  # fmt: skip
ONE_AFTER_ANOTHER = PrefillLimits(max_partial=1)


class Bench:
    """One worker; ``ended`` has the names in order of their end, and ``tokens`` each prompt's
    tokens per step."""

    def __init__(
        self, limits: PrefillLimits | None = None, caches: bool = True, depth: int = 1
    ) -> None:
        self.core = Scheduler(1000, 10, caches, depth, limits or PrefillLimits())
        self.core.add_worker("w", CAPACITY)
        self.worker = SimulatedWorker(CAPACITY)
        self.ended: list[str] = []
        self.tokens: list[dict[str, int]] = []

    def add(self, name: str, prompt_len: int, max_tokens: int = 1, first_id: int = 0) -> None:
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        add_one(self.core, name, range(first_id, first_id + prompt_len), params)

    def step(self) -> None:
        planned = self.core.plan("w")
        assert planned is not None
        self._note(planned)
        for emission in self.core.absorb("w", *self.worker.step(planned)):
            if emission.ends:
                self.ended.append(emission.sequence.request)

    def _note(self, planned: Planned) -> None:
        running = self.core.workers["w"].running
        rows = planned.plan.prefill
        self.tokens.append({running[row.slot].request: row.num_tokens for row in rows})

    def run(self) -> None:
        while self.core.sequences:
            self.step()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_overtakes_one_of_30000_tokens_that_came_first(depth: int):
    bench = Bench(depth=depth)
    bench.add("long", 30_000)
    bench.step()
    bench.add("short", 200, first_id=100_000)
    bench.step()
    assert bench.tokens == [{"long": 512}, {"short": 200, "long": 312}]
    assert bench.ended == ["short"]


def test_a_long_prompt_has_its_part_of_each_step_however_many_short_ones_come():
    bench = Bench()
    bench.add("long", 30_000)
    for number in range(150):
        bench.add(str(number), 500, first_id=100_000 + 1000 * number)
        bench.step()
    assert [tokens.get("long", 0) >= 256 for tokens in bench.tokens[:100]] == [True] * 100
    assert "long" in bench.ended


def test_the_rest_of_a_step_goes_to_the_long_prompt():
    bench = Bench()
    bench.add("long", 2000)
    bench.run()
    assert [tokens.get("long") for tokens in bench.tokens] == [512, 512, 512, 464]


def test_with_one_in_the_middle_nobody_overtakes():
    bench = Bench(ONE_AFTER_ANOTHER)
    bench.add("long", 2000)
    bench.add("short", 20, first_id=100_000)
    bench.run()
    assert bench.tokens == [{"long": 512}] * 3 + [{"long": 464, "short": 20}]


def test_a_second_long_prompt_waits_and_short_ones_pass_it():
    bench = Bench()
    for number, name in enumerate(("first", "second")):
        bench.add(name, 5000, first_id=100_000 * number)
    for number in range(8):
        bench.add(str(number), 400, first_id=1_000_000 + 1000 * number)
    bench.run()
    assert bench.ended == [*map(str, range(8)), "first", "second"]
    assert not any({"first", "second"} <= tokens.keys() for tokens in bench.tokens[:8])


def test_two_long_prompts_under_way_share_the_rest_of_a_step():
    bench = Bench(PrefillLimits(max_partial=3, max_long=2))
    for number, name in enumerate(("first", "second")):
        bench.add(name, 5000, first_id=100_000 * number)
    bench.step()
    bench.add("short", 100, first_id=1_000_000)
    bench.step()
    assert bench.tokens == [
        {"first": 256, "second": 256},
        {"short": 100, "first": 206, "second": 206},
    ]


def test_the_uncached_part_is_the_length_of_a_prompt():
    bench = Bench()
    bench.add("dialogue", 3000)
    bench.run()
    bench.add("long", 30_000, first_id=100_000)
    bench.step()
    bench.add("dialogue goes on", 3100)
    bench.step()
    assert bench.ended[-1] == "dialogue goes on"


@pytest.mark.parametrize("caches", [True, False])
def test_choices_of_a_long_prompt_wait_for_the_first_one(caches: bool):
    bench = Bench(PrefillLimits(max_partial=3, max_long=2), caches)
    for number in range(2):
        bench.add(f"long/{number}", 5000)
    bench.step()
    assert bench.tokens == [{"long/0": 512}]
    bench.run()
    assert bench.ended == ["long/0", "long/1"]


def test_the_threshold_decides_which_prompts_are_long():
    bench = Bench(PrefillLimits(long_threshold=2000))
    bench.add("first", 1500)
    bench.add("second", 100, first_id=100_000)
    bench.run()
    assert bench.tokens == [{"first": 512}, {"first": 512}, {"first": 476, "second": 36},
                            {"second": 64}]  # fmt: skip


def test_a_long_prompt_goes_to_the_worker_that_can_begin_it():
    bench = Bench()
    bench.add("first", 30_000)
    bench.step()
    bench.core.add_worker("other", CAPACITY)
    other = SimulatedWorker(CAPACITY)
    bench.core.workers["w"].admits = False
    for number in range(3):
        bench.add(str(number), 20, max_tokens=400, first_id=100_000 * (1 + number))
        bench.core.absorb("other", *other.step(bench.core.plan("other")))
    bench.core.workers["w"].admits = True
    bench.add("second", 30_000, first_id=1_000_000)
    planned = bench.core.plan("other")
    assert [admit.request for admit in planned.plan.admit] == ["second"]


def test_the_missing_part_of_a_long_prompt_is_looked_up_once():
    bench = Bench(PrefillLimits(max_partial=3, max_long=1, long_threshold=1000))
    for number in range(4):
        bench.add(f"{number} begins", 2000, first_id=100_000 * number)
        bench.run()
    bench.add("long", 30_000, first_id=1_000_000)
    bench.step()
    for number in range(4):
        bench.add(f"{number} goes on", 6000, first_id=100_000 * number)
    index: Any = bench.core.workers["w"].index
    num_found: list[int] = []
    find = index.find

    def count(name: bytes) -> int | None:
        num_found[-1] += 1
        return find(name)

    index.find = count
    for _ in range(5):
        num_found.append(0)
        bench.step()
    assert num_found[0] > 4 * 2000 // 16
    assert num_found[1:] == [5] * 4, "the first in turn twice"
    assert not any(tokens.keys() - {"long"} for tokens in bench.tokens[-5:])


def test_a_long_prompt_is_short_when_others_have_computed_its_beginning():
    bench = Bench(PrefillLimits(max_partial=3, max_long=1, long_threshold=1000))
    bench.add("long", 30_000)
    bench.step()
    bench.add("waits", 1600, first_id=100_000)
    bench.step()
    assert bench.tokens[-1].keys() == {"long"}
    bench.add("computes its beginning", 900, first_id=100_000)
    while "waits" not in bench.ended:
        bench.step()
    assert "long" not in bench.ended
