"""Spans of sequences in slots: one per prefill chunk, and one for decoding."""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import median

from services.worker.extension import Observer
from shared.wire.envelope import read_options
from shared.wire.messages import Admit, RunKind, Span, SpanReport, SpanValue, StepPlan, StepResult
from shared.wire.spans import SpanBuffer

MAX_CHUNKS = 32
"""Chunks of a prompt with a span each; the last span covers all further ones."""
NUM_STEPS = 4096
"""Recent steps with known times; a longer decoding is measured by its last ones."""


@dataclass(slots=True)
class _Chunk:
    start_s: float
    end_s: float
    num_tokens: int
    num_chunks: int = 1


@dataclass(slots=True)
class _Stay:
    """A sequence in a slot. It decodes after step ``last_prefill``, which ended at ``decodes_s``
    when all steps had taken ``computed_s`` seconds."""

    row: Admit
    decodes_s: float
    computed_s: float
    last_prefill: int
    chunks: list[_Chunk] = field(default_factory=list)


class SlotSpans(Observer):
    """Follows plans and their results, in order. Its cost per step does not grow with the number of
    decoding sequences. Times are unix times."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._plans: deque[tuple[StepPlan, list[Admit]]] = deque()  # with the traced rows
        self._stays: dict[int, _Stay] = {}
        self._left = SpanBuffer()
        self._times = array("d", bytes(8 * NUM_STEPS))
        self._num_steps = self._num_stale = 0
        self._computed_s = 0.0

    def begin(self, plan: StepPlan) -> None:
        """Raises CodecError for bad options."""
        traced = [row for row in plan.admit if read_options(row.options).traces(row.choice)]
        self._plans.append((plan, traced))

    def end(self, result: StepResult, ended_s: float) -> list[SpanReport]:
        """Returns the reports of sequences that left their slots or ended with this result, of the
        oldest plan, at ``ended_s``."""
        (plan, admitted), start_s = self._plans.popleft(), ended_s - result.step_s
        if self._num_stale:
            self._num_stale -= 1
            return []
        for slot in plan.release:
            if slot in self._stays:
                self._left.add(self._report(slot, start_s))
        for row in admitted:
            self._stays[row.slot] = _Stay(row, start_s, self._computed_s, self._num_steps)
        for _ in range(result.num_steps):
            self._note_step(result.step_s / result.num_steps)
        if self._stays:
            self._follow(plan, admitted, result, start_s, ended_s)
        return self._left.take()

    def clear(self) -> None:
        """The scheduler is lost, and reports of its sequences are dropped."""
        self._stays.clear()
        self._num_stale = len(self._plans)

    def _follow(
        self,
        plan: StepPlan,
        admitted: list[Admit],
        result: StepResult,
        start_s: float,
        ended_s: float,
    ) -> None:
        for row in admitted:
            if row.num_ids - row.num_cached == 1:  # it is decoded
                self._note_chunk(self._stays[row.slot], _Chunk(start_s, ended_s, 1))
        for chunk in plan.prefill:
            if stay := self._stays.get(chunk.slot):
                self._note_chunk(stay, _Chunk(start_s, ended_s, chunk.num_tokens))
        num_own = Counter(row.slot for row in result.rows if row.run.kind == RunKind.OUTPUT)
        for each in result.rows:
            if (each.finish or each.error is not None) and each.slot in self._stays:
                num_later = result.num_steps - max(1, num_own[each.slot])
                self._left.add(self._report(each.slot, ended_s, num_later))

    def _note_step(self, step_s: float) -> None:
        self._times[self._num_steps % NUM_STEPS] = step_s
        self._num_steps += 1
        self._computed_s += step_s

    def _note_chunk(self, stay: _Stay, chunk: _Chunk) -> None:
        stay.decodes_s, stay.computed_s = chunk.end_s, self._computed_s
        stay.last_prefill = self._num_steps
        if len(stay.chunks) < MAX_CHUNKS:
            stay.chunks.append(chunk)
            return
        last = stay.chunks[-1]
        last.end_s, last.num_chunks = chunk.end_s, last.num_chunks + 1
        last.num_tokens += chunk.num_tokens

    def _report(self, slot: int, now_s: float, num_later: int = 0) -> SpanReport:
        """The last ``num_later`` steps of the plan ran without the sequence."""
        stay = self._stays.pop(slot)
        spans = [_of_chunk(chunk) for chunk in stay.chunks]
        if self._num_steps - num_later > stay.last_prefill:
            spans.append(self._of_decoding(stay, num_later, now_s))
        return SpanReport(stay.row.request, stay.row.attempt, "worker", self._instance, spans)

    def _of_decoding(self, stay: _Stay, num_later: int, now_s: float) -> Span:
        end = self._num_steps - num_later
        first = max(stay.last_prefill, self._num_steps - NUM_STEPS)
        times = [self._times[step % NUM_STEPS] for step in range(first, end)]
        attributes: dict[str, SpanValue] = {
            "num_steps": end - stay.last_prefill,
            "step_min_ms": _ms(min(times)),
            "step_median_ms": _ms(median(times)),
            "step_max_ms": _ms(max(times)),
            "computed_ms": _ms(self._computed_s - stay.computed_s - num_later * times[-1]),
        }
        return Span("decode", stay.decodes_s, max(0.0, now_s - stay.decodes_s), 0, attributes)


def _of_chunk(chunk: _Chunk) -> Span:
    attributes: dict[str, SpanValue] = {"num_tokens": chunk.num_tokens}
    if chunk.num_chunks > 1:
        attributes["num_chunks"] = chunk.num_chunks
    return Span("prefill", chunk.start_s, max(0.0, chunk.end_s - chunk.start_s), 0, attributes)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
