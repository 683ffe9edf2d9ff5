"""Spans of sequences: their waits with reasons, their stays, and their ends."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from services.scheduler.extension import Observer
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival, Ended, Sequence, WaitReason
from shared.wire.messages import Admit, Span, SpanReport, SpanValue, StepPlan
from shared.wire.spans import unix_s

Sums = list[float]  # seconds, by reason
MAX_STAYS = 60
"""Waits and stays of a sequence with a span each. A sequence preempted again and again has more."""
MAX_ENDED = 4096
"""Ended sequences kept for reports of their workers still to come."""
SHOWN_S = 0.001
Key = tuple[str, int]


class WaitTimes:
    """The total time of each reason of the first waiting sequence. Times are monotonic. The
    difference of two totals explains a wait."""

    def __init__(self, now_s: float) -> None:
        self._sums = [0.0] * len(WaitReason)
        self._wait_reason = WaitReason.PLANS_IN_FLIGHT
        self._since_s = now_s

    def note(self, wait_reason: WaitReason, now_s: float) -> None:
        """``wait_reason`` holds from ``now_s`` on."""
        self._sums[self._wait_reason] += now_s - self._since_s
        self._wait_reason, self._since_s = wait_reason, now_s

    def sums(self, now_s: float) -> Sums:
        self.note(self._wait_reason, now_s)
        return self._sums.copy()


def difference(before: Sums, after: Sums) -> list[tuple[float, WaitReason]]:
    """Returns the seconds added for each reason, longest first."""
    added = [
        (last - first, WaitReason(number))
        for number, (first, last) in enumerate(zip(before, after, strict=True))
        if last > first
    ]
    return sorted(added, reverse=True)


@dataclass(slots=True)
class _Wait:
    """A time without a slot from ``since_s``. The counters are from its beginning: the seconds of
    each reason, plans with admission, admitted sequences, and sequences ahead in the queue."""

    why: WaitReason | None
    since_s: float
    sums: Sums
    num_tries: int
    num_admitted: int
    num_before: int


@dataclass(slots=True)
class _Stay:
    worker: str
    since_s: float
    row: Admit
    num_emitted: int


@dataclass(slots=True)
class _Trace:
    sequence: Sequence
    state: _Wait | _Stay
    spans: list[Span] = field(default_factory=list)
    num_left_out: int = 0


class SequenceSpans(Observer):
    """Follows the traced sequences of ``core``, and calls ``send`` with the route and the report of
    each. Times are monotonic."""

    def __init__(
        self,
        core: Scheduler,
        instance: str,
        send: Callable[[int, SpanReport], None],
        now_s: float,
    ) -> None:
        self._core = core
        self._instance = instance
        self._send = send
        self._waits = WaitTimes(now_s)
        self._open: dict[Key, _Trace] = {}
        self._ended: OrderedDict[Key, int] = OrderedDict()  # their routes
        self._returned: list[tuple[Sequence, WaitReason]] = []  # lost their slots
        core.queues.on_return = self._note_return

    def begin(self, arrival: Arrival) -> None:
        if not arrival.options.is_traced:
            return
        generate, now_s = arrival.generate, arrival.now_s
        for each in generate.sequences:
            if arrival.options.traces(each.choice):
                sequence = self._core.sequences[each.request, generate.attempt]
                self._open[sequence.key] = _Trace(sequence, self._wait(sequence, None, now_s))

    def admit(self, worker: str, plan: StepPlan, now_s: float) -> None:
        if not plan.admit:
            return
        self._note_returned(now_s)
        for row in plan.admit if self._open else ():
            if trace := self._open.get((row.request, row.attempt)):
                self._close(trace, now_s)
                num_emitted = len(trace.sequence.emitted)
                trace.state = _Stay(worker, now_s, row, num_emitted)

    def account(self, now_s: float) -> None:
        self._waits.note(self._core.wait_reason, now_s)
        self._note_returned(now_s)

    def end(self, ended: Ended, now_s: float) -> None:
        sequence = ended.sequence
        trace = self._open.pop(sequence.key, None)
        if trace is None:
            return
        self._close(trace, now_s, ended.reason)
        self._ended[sequence.key] = sequence.route
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)
        attributes: dict[str, SpanValue] = {
            "reason": ended.reason,
            "attempt": sequence.attempt,
            "choice": sequence.choice,
            "num_prompt_tokens": len(sequence.prompt),
            "num_cached_tokens": sequence.num_cached,
            "num_output_tokens": len(sequence.emitted),
            "num_steps": sequence.num_steps,
            "num_drafts": sequence.num_drafts,
            "num_accepted_drafts": sequence.num_accepted,
            "num_preemptions": sequence.num_preemptions,
            "num_held_back": sequence.num_held_back,
            "num_worker_deaths": sequence.num_worker_deaths,
        }
        if trace.num_left_out:
            attributes["num_left_out"] = trace.num_left_out
        whole = _span("sequence", sequence.arrived_s, now_s, 0, attributes)
        self._send(sequence.route, self._report(sequence.key, [whole, *trace.spans]))

    def forward(self, report: SpanReport) -> None:
        """Reports of unknown sequences are dropped."""
        key = report.request, report.attempt
        trace = self._open.get(key)
        route = trace.sequence.route if trace is not None else self._ended.get(key)
        if route is not None:
            self._send(route, report)

    def _note_return(self, sequence: Sequence, why: WaitReason) -> None:
        if sequence.key in self._open:
            self._returned.append((sequence, why))

    def _note_returned(self, now_s: float) -> None:
        """The core has no clock. A sequence in ``_returned`` may have ended since."""
        for sequence, why in self._returned:
            if trace := self._open.get(sequence.key):
                self._close(trace, now_s, why.label)
                trace.state = self._wait(sequence, why, now_s)
        self._returned.clear()

    def _report(self, key: Key, spans: list[Span]) -> SpanReport:
        return SpanReport(*key, "scheduler", self._instance, spans)

    def _wait(self, sequence: Sequence, why: WaitReason | None, now_s: float) -> _Wait:
        planner, waiting = self._core.planner, self._core.queues.waiting
        sums = self._waits.sums(now_s)
        num_before = waiting.num_before(sequence)
        return _Wait(why, now_s, sums, planner.num_tries, planner.num_admitted, num_before)

    def _close(self, trace: _Trace, now_s: float, why: str = "") -> None:
        """Ends the current wait or stay of a sequence."""
        if len(trace.spans) == MAX_STAYS:
            trace.num_left_out += 1
            return
        match trace.state:
            case _Wait() as wait:
                attributes = self._why_it_waited(trace.sequence, wait, now_s)
                trace.spans.append(_span("queue", wait.since_s, now_s, 1, attributes))
            case _Stay() as stay:
                trace.spans.append(_span("run", stay.since_s, now_s, 1, _of_stay(trace, stay, why)))

    def _why_it_waited(self, sequence: Sequence, wait: _Wait, now_s: float) -> dict[str, SpanValue]:
        """The reason, and the milliseconds of each reason of the first waiting sequence."""
        planner = self._core.planner
        waited = difference(wait.sums, self._waits.sums(now_s))
        num_admitted = planner.num_admitted - wait.num_admitted
        num_sooner = max(0, num_admitted - 1 - wait.num_before)
        reason = waited[0][1] if waited else WaitReason.PLANS_IN_FLIGHT
        if wait.why in (WaitReason.CREDIT, WaitReason.ISOLATED):
            reason = wait.why
        elif sequence.is_isolated and reason != WaitReason.NO_WORKER:
            reason = WaitReason.ISOLATED
        elif (
            sequence.wait_reason
            and 2 * sequence.num_passed_over > planner.num_tries - wait.num_tries
        ):
            reason = sequence.wait_reason
        elif num_sooner > wait.num_before:
            reason = WaitReason.PRIORITY
        attributes: dict[str, SpanValue] = {
            "reason": reason.label,
            "num_before": wait.num_before,
            "num_sooner": num_sooner,
        }
        if wait.why is not None:
            attributes["after"] = wait.why.label
        for seconds, wait_reason in waited:
            if seconds >= SHOWN_S:
                attributes[f"{wait_reason.label}_ms"] = round(1000 * seconds, 3)
        return attributes


def _of_stay(trace: _Trace, stay: _Stay, why: str) -> dict[str, SpanValue]:
    return {
        "worker": stay.worker,
        "slot": stay.row.slot,
        "num_known_tokens": stay.row.num_ids,
        "num_cached_tokens": stay.row.num_cached,
        "num_output_tokens": len(trace.sequence.emitted) - stay.num_emitted,
        "ends_with": why,
    }


def _span(
    name: str, start_s: float, end_s: float, parent: int, attributes: dict[str, SpanValue]
) -> Span:
    return Span(name, unix_s(start_s), max(0.0, end_s - start_s), parent, attributes)
