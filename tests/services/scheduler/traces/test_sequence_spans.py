"""Spans of sequences: their waits with reasons, and their stays in slots."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, WaitReason
from services.scheduler.traces.sequence_spans import SequenceSpans, WaitTimes, difference
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    MAX_TRACED,
    Capacity,
    Generate,
    Grant,
    NewSequence,
    SamplingParams,
    Span,
    SpanReport,
)
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64,
                    max_model_len=128)  # fmt: skip


def test_time_counts_for_the_reason_of_that_time() -> None:
    waits = WaitTimes(0.0)
    waits.note(WaitReason.SLOTS, 1.0)
    before = waits.sums(2.0)
    waits.note(WaitReason.KV_BLOCKS, 3.0)
    assert difference(before, waits.sums(7.0)) == [
        (4.0, WaitReason.KV_BLOCKS),
        (1.0, WaitReason.SLOTS),
    ]


class Traced:
    """A core, a worker of one slot, and the reports that were sent; a second each time."""

    def __init__(self, **capacity: Any) -> None:
        self.core, own = Scheduler(100, 10), replace(CAPACITY, **capacity)
        self.core.add_worker("w", own)
        self.reports: dict[str, list[Span]] = {}
        self.spans = SequenceSpans(self.core, "s", self._keep, 0.0)
        self.worker = SimulatedWorker(own)
        self.now_s = 0.0

    def _keep(self, route: int, report: SpanReport) -> None:
        self.reports[report.request] = report.spans

    def add(
        self,
        name: str,
        prompt_len: int = 3,
        first_id: int = 0,
        max_tokens: int = 20,
        num_choices: int = 1,
        **options: Any,
    ) -> None:
        ids = np.arange(first_id, first_id + prompt_len, dtype=np.int32)
        names = [name, *(f"{name}{number}" for number in range(1, num_choices))]
        generate = Generate(
            request=name,
            attempt=1,
            params=SamplingParams(seed=0, max_tokens=max_tokens),
            sequences=[NewSequence(each, number) for number, each in enumerate(names)],
            options=write_options(replace(RequestOptions(is_traced=True), **options)),
        )
        arrival = Arrival(generate=generate, prompt=ids, emitted=ids[:0], route=0, now_s=self.now_s)
        self.core.add(arrival)
        self.spans.begin(arrival)

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
            self.spans.end(ended, self.now_s)

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


def test_only_traced_requests_and_their_first_choices_are_reported() -> None:
    traced = Traced()
    traced.add("untraced", max_tokens=1, is_traced=False)
    traced.add("a", max_tokens=1, num_choices=MAX_TRACED + 1)
    traced.run()
    assert len(traced.reports) == MAX_TRACED
    assert not {"untraced", f"a{MAX_TRACED}"} & set(traced.reports)
