"""Why the first in the queue waits, as plans say it, and what becomes of that over time."""

from typing import Any

import msgspec
import pytest

from benchmarks.harness.sequences import add_one
from services.scheduler.prefills import PrefillLimits
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Ended, Obstacle
from services.scheduler.traces.sequence_spans import SequenceSpans, WaitTimes, difference
from services.scheduler.worker_state import PROBATION_STEPS
from shared.wire.messages import Capacity, Grant, SamplingParams, Span, SpanReport
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64,
                    max_model_len=128)  # fmt: skip


def core_of(limits: PrefillLimits | None = None, depth: int = 1, **capacity: Any) -> Scheduler:
    core = Scheduler(100, 10, pipeline_depth=depth, prefill_limits=limits or PrefillLimits())
    core.add_worker("w", replaced(**capacity))
    return core


def replaced(**capacity: Any) -> Capacity:
    fields = {name: getattr(CAPACITY, name) for name in CAPACITY.__struct_fields__}
    return Capacity(**(fields | capacity))


def add(core: Scheduler, name: str, prompt_len: int = 3, first_id: int = 0, **fields: Any) -> None:
    params = SamplingParams(seed=0, max_tokens=fields.pop("max_tokens", 20))
    add_one(core, name, range(first_id, first_id + prompt_len), params, 0, **fields)


@pytest.mark.parametrize(
    ("obstacle", "capacity", "limits", "prompts"),
    [
        (Obstacle.SLOTS, {"max_num_seqs": 1}, None, [3, 3]),
        (Obstacle.KV_BLOCKS, {"num_blocks": 8}, None, [24, 24]),
        (Obstacle.STEP_BUDGET, {"max_num_batched_tokens": 8}, None, [8, 3]),
        (Obstacle.LONG_PREFILLS, {"max_num_batched_tokens": 8}, None, [30, 31]),
        (
            Obstacle.PARTIAL_PREFILLS,
            {"max_num_batched_tokens": 8},
            PrefillLimits(max_partial=1, long_threshold=6),
            [7, 3],
        ),
        (Obstacle.PLANS_IN_FLIGHT, {}, None, [3, 3]),
    ],
)
def test_a_plan_says_why_it_admitted_no_more(
    obstacle: Obstacle, capacity: Any, limits: PrefillLimits | None, prompts: list[int]
) -> None:
    core = core_of(limits, **capacity)
    for number, prompt_len in enumerate(prompts):
        add(core, str(number), prompt_len, first_id=1000 * number, max_tokens=8)
    core.plan("w")
    assert core.obstacle == obstacle
    assert len(core.queues.waiting) == (obstacle != Obstacle.PLANS_IN_FLIGHT)


def test_a_worker_that_has_shown_nothing_yet_is_an_obstacle() -> None:
    core, worker = core_of(), SimulatedWorker(CAPACITY)
    add(core, "long", max_tokens=100)
    for _ in range(PROBATION_STEPS):
        core.absorb("w", *worker.step(core.plan("w")))
    core.add_worker("new", CAPACITY)
    add(core, "a")
    add(core, "b")
    core.plan("new")
    assert core.obstacle == Obstacle.PROBATION, "it gets one at a time"


def test_a_better_worker_is_an_obstacle_and_so_is_none() -> None:
    core, obstacles = core_of(), []
    core.add_worker("other", CAPACITY)
    add(core, "a")
    add(core, "b")
    core.plan("w")
    obstacles.append(core.obstacle)
    for name in ("w", "other"):
        core.remove_worker(name, 0)
    obstacles.append(core.obstacle)
    assert obstacles == [Obstacle.PLACEMENT, Obstacle.NO_WORKER]


def test_time_is_that_of_the_obstacle_that_was_there() -> None:
    waits = WaitTimes(0.0)
    waits.note(Obstacle.SLOTS, 1.0)
    before = waits.sums(2.0)
    waits.note(Obstacle.KV_BLOCKS, 3.0)
    assert difference(before, waits.sums(7.0)) == [(4.0, Obstacle.KV_BLOCKS), (1.0, Obstacle.SLOTS)]


class Traced:
    """A core, a worker of one slot, and the reports that were sent; a second each time."""

    def __init__(self, **capacity: Any) -> None:
        self.core = core_of(**capacity)
        self.reports: dict[str, list[Span]] = {}
        self.spans = SequenceSpans(self.core, "s", self._keep, 0.0)
        self.worker = SimulatedWorker(replaced(**capacity))
        self.now_s = 0.0

    def _keep(self, route: int, report: SpanReport) -> None:
        self.reports[report.request] = report.spans

    def add(self, name: str, **fields: Any) -> None:
        add(self.core, name, **fields)
        sequence = self.core.sequences[name, 1]
        sequence.options = msgspec.structs.replace(sequence.options, is_traced=True)
        self.spans.begin(name, 1, self.now_s)

    def step(self) -> None:
        planned = self.core.plan("w")
        assert planned is not None
        self.spans.admit("w", planned.plan, self.now_s)
        self.spans.account(self.now_s)
        self.now_s += 1
        self.core.absorb("w", *self.worker.step(planned))
        self.account()

    def account(self) -> None:
        self.spans.account(self.now_s)
        for ended in self.core.take_ended():
            self.spans.end(Ended(ended.sequence, ended.reason), self.now_s)

    def run(self) -> None:
        while self.core.sequences:
            self.step()

    def facts(self, request: str, name: str) -> list[dict[str, Any]]:
        return [span.attributes for span in self.reports[request] if span.name == name]


def test_a_preempted_sequence_has_a_span_for_each_stay_and_each_wait() -> None:
    traced = Traced(num_blocks=10, max_num_seqs=2)
    for name in ("a", "b"):
        traced.add(name, prompt_len=12, first_id=ord(name) * 100, max_tokens=16)
    traced.run()
    first, again = traced.facts("b", "run")
    assert (first["ends_with"], again["ends_with"]) == ("kv_blocks", "length")
    assert first["num_output_tokens"] + again["num_output_tokens"] == 16
    assert again["num_known_tokens"] == 12 + first["num_output_tokens"]
    arrived, preempted = traced.facts("b", "queue")
    assert "after" not in arrived
    assert (preempted["after"], preempted["reason"]) == ("kv_blocks", "kv_blocks")
    (whole,) = traced.facts("b", "sequence")
    assert (whole["num_preemptions"], whole["num_output_tokens"]) == (1, 16)
    assert [len(traced.facts("a", name)) for name in ("queue", "run")] == [1, 1]


def test_a_sequence_whose_client_does_not_read_waits_for_credit() -> None:
    traced = Traced(max_num_seqs=1, max_model_len=1000, num_blocks=300)
    traced.add("slow", max_tokens=600)
    for _ in range(256):
        traced.step()
    traced.add("next", max_tokens=3)
    while "next" not in traced.reports:
        traced.step()
    traced.core.grant(Grant("slow", 1, 600, 1 << 20))
    traced.run()
    assert [run["ends_with"] for run in traced.facts("slow", "run")] == ["credit", "length"]
    assert [each["reason"] for each in traced.facts("slow", "queue")][1] == "credit"


def test_one_that_others_overtake_waits_for_their_priority() -> None:
    traced = Traced(max_num_seqs=1)
    traced.add("running", max_tokens=2)
    traced.step()
    traced.add("late", max_tokens=1, priority=9)
    for name in ("a", "b"):
        traced.add(name, max_tokens=1)
    traced.run()
    (queue,) = traced.facts("late", "queue")
    assert (queue["reason"], queue["num_before"], queue["num_sooner"]) == ("priority", 0, 2)
    (queue,) = traced.facts("b", "queue")
    assert (queue["reason"], queue["num_before"]) == ("slots", 1)
