"""A worker's reports of sequences that leave their slots."""

from typing import Any

from services.worker.traces.slot_spans import MAX_CHUNKS, NUM_STEPS, SlotSpans
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    Admit,
    Decode,
    FinishReason,
    Prefill,
    ResultRow,
    SamplingParams,
    SpanReport,
    StepPlan,
    StepResult,
    TokenRun,
)


class Steps:
    """Consecutive steps of ``step_s`` seconds."""

    def __init__(self) -> None:
        self.spans = SlotSpans("w")
        self.now_s = 1000.0
        self._num = 0

    def run(
        self, step_s: float = 0.5, finish: FinishReason | None = None, **rows: Any
    ) -> list[SpanReport]:
        empty: dict[str, Any] = {"release": [], "admit": [], "extend": [], "prefill": []}
        self._num += 1
        plan = StepPlan(self._num, **(empty | {"decode": []} | rows))
        self.spans.begin(plan)
        self.now_s += step_s
        ends = [ResultRow(0, "a~1/0/0", 1, TokenRun(1), finish)]
        return self.spans.end(StepResult(self._num, ends, step_s), self.now_s)


def admitted(num_ids: int = 20, is_traced: bool = True) -> list[Admit]:
    params = SamplingParams(seed=0)
    options = write_options(RequestOptions(is_traced=is_traced))
    return [Admit(0, "a~1/0/0", 1, 0, 0, num_ids, num_ids, 0, params, [], options=options)]


def test_chunks_have_a_span_each_and_decoding_has_one() -> None:
    steps = Steps()
    assert steps.run(admit=admitted(), prefill=[Prefill(0, 12)]) == []
    assert steps.run(prefill=[Prefill(0, 8)]) == []
    for step_s in (0.1, 0.4):
        assert steps.run(step_s, decode=[Decode(0)]) == []
    (report,) = steps.run(0.2, "stop", decode=[Decode(0)])
    assert (report.request, report.service, report.instance) == ("a~1/0/0", "worker", "w")
    first, second, decode = report.spans
    assert [first.attributes, second.attributes] == [{"num_tokens": 12}, {"num_tokens": 8}]
    assert (first.start_s, second.start_s, decode.start_s) == (1000.0, 1000.5, 1001.0)
    assert round(decode.duration_s, 6) == 0.7
    assert decode.attributes == {
        "num_steps": 3,
        "step_min_ms": 100.0,
        "step_median_ms": 200.0,
        "step_max_ms": 400.0,
        "computed_ms": 700.0,
    }
    assert steps.run(release=[0]) == [], "it has been reported"


def test_a_plan_of_several_steps_counts_the_sequences_own() -> None:
    spans, row = SlotSpans("w"), ResultRow(0, "a~1/0/0", 1, TokenRun(1))
    spans.begin(StepPlan(1, [], admitted(), [], [Prefill(0, 20)], []))
    assert spans.end(StepResult(1, [row], 0.5), 1000.5) == []
    for step, finish in ((2, None), (3, "stop")):
        rows = [row, ResultRow(0, "a~1/0/0", 1, TokenRun(1), finish)]  # type: ignore[arg-type]
        num_steps = 2 if finish is None else 5  # three of them are other sequences' steps
        spans.begin(StepPlan(step, [], [], [], [], [Decode(0), Decode(1)], 0, num_steps))
        result = StepResult(step, rows, 0.1 * num_steps, num_steps=num_steps)
        reports = spans.end(result, 1000.5 + step)
    (report,) = reports
    attributes = report.spans[-1].attributes
    assert attributes["num_steps"] == 4
    assert attributes["step_max_ms"] == attributes["step_min_ms"] == 100.0
    assert attributes["computed_ms"] == 400.0


def test_a_prompt_of_which_one_token_is_lacking_is_a_chunk_too() -> None:
    steps = Steps()
    (report,) = steps.run(0.5, "length", admit=admitted(1), decode=[Decode(0)])
    assert [span.name for span in report.spans] == ["prefill"]


def test_a_released_sequence_is_reported_with_that_plan() -> None:
    steps = Steps()
    steps.run(admit=admitted(), prefill=[Prefill(0, 20)])
    steps.run(decode=[Decode(0)])
    (report,) = steps.run(release=[0], admit=admitted(), prefill=[Prefill(0, 20)])
    assert [span.name for span in report.spans] == ["prefill", "decode"]
    (again,) = steps.run(0.5, "length", decode=[Decode(0)])
    assert [span.start_s for span in again.spans] == [1001.0, 1001.5]


def test_spans_and_kept_times_are_bounded() -> None:
    steps = Steps()
    for number in range(MAX_CHUNKS + 9):
        steps.run(admit=[] if number else admitted(1000), prefill=[Prefill(0, 2)])
    steps.run(9.0, decode=[Decode(0)])
    for _ in range(NUM_STEPS):
        steps.run(0.001, decode=[Decode(0)])
    (report,) = steps.run(release=[0])
    *chunks, decode = report.spans
    assert len(chunks) == MAX_CHUNKS
    assert chunks[-1].attributes == {"num_tokens": 20, "num_chunks": 10}
    assert decode.attributes["num_steps"] == NUM_STEPS + 1
    assert decode.attributes["step_max_ms"] == 1.0, "the long step was too long ago"


def test_untraced_sequences_and_ones_of_a_lost_scheduler_are_not_reported() -> None:
    steps = Steps()
    steps.run(admit=admitted(is_traced=False), prefill=[Prefill(0, 20)])
    assert steps.run(0.5, "stop", decode=[Decode(0)]) == []
    empty: dict[str, Any] = {"extend": [], "prefill": [], "decode": [], "release": []}
    steps.spans.begin(StepPlan(9, admit=admitted(), **empty))
    steps.spans.clear()
    assert steps.spans.end(StepResult(9, [], 0.1), 2000.0) == []
    assert steps.run(release=[0]) == []
