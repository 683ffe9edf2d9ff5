"""Builds the message for one tokenizer from the results of one or more steps."""

import asyncio
from collections.abc import Sequence as Items
from typing import NamedTuple

from msgspec.structs import replace

from services.scheduler.results import Emission
from services.scheduler.sequence import Sequence
from shared.link.peer import Peer
from shared.wire.messages import (
    Finished,
    FinishReason,
    RunKind,
    SpanReport,
    TokenRow,
    TokenRun,
    Tokens,
)
from shared.wire.spans import SpanBuffer
from shared.wire.token_arrays import Layout, Selection, TokenArrays, join, sum_runs


class StepEmissions(NamedTuple):
    """A plan's rows for one tokenizer. ``layout`` is that of the whole result."""

    emissions: list[Emission]
    layout: Layout

    @property
    def is_urgent(self) -> bool:
        """True if a client waits for a first token or an end."""
        return any(not each.position or each.ends for each in self.emissions)

    def arrays(self) -> TokenArrays:
        """Returns the buffers of its rows, as views if the rows are contiguous."""
        selection = Selection(self.layout)
        for emission in self.emissions:
            selection.add(emission.index)
        return selection.arrays()


def tokens_of(
    steps: Items[StepEmissions], spans: Items[SpanReport] = ()
) -> tuple[Tokens, TokenArrays]:
    """Returns the message with ``steps`` and ``spans``, and its buffers. Several steps of a
    sequence become one row, unless its rows list drafts."""
    if not steps:
        return Tokens([], [], [*spans]), TokenArrays()
    emissions = [emission for step in steps for emission in step.emissions]
    finished = [
        _finished(each.sequence, each.row.finish)
        for each in emissions
        if each.row.finish is not None
    ]
    if len(steps) == 1:
        return Tokens(_rows(emissions), finished, [*spans]), steps[0].arrays()
    sorted_parts = [entry for entries in _by_sequence(steps).values() for entry in entries]
    rows = _rows([emission for emission, _ in sorted_parts])
    return Tokens(rows, finished, [*spans]), join([part for _, part in sorted_parts])


def _rows(emissions: Items[Emission]) -> list[TokenRow]:
    rows: list[TokenRow] = []
    before: Sequence | None = None
    for emission in emissions:
        run = emission.row.run
        if emission.sequence is before and _continues(rows[-1].run, run):
            rows[-1] = replace(rows[-1], run=sum_runs([rows[-1].run, run]))
        else:
            rows.append(_row(emission, run))
        before = emission.sequence
    return rows


def _by_sequence(
    steps: Items[StepEmissions],
) -> dict[tuple[str, int], list[tuple[Emission, TokenArrays]]]:
    found: dict[tuple[str, int], list[tuple[Emission, TokenArrays]]] = {}
    for emissions, layout in steps:
        for emission in emissions:
            part = layout.part(emission.index, emission.index + 1)
            found.setdefault(emission.sequence.key, []).append((emission, part))
    return found


def _row(emission: Emission, run: TokenRun) -> TokenRow:
    sequence = emission.sequence
    return TokenRow(sequence.request, sequence.attempt, emission.position, run, sequence.num_cached)


def _finished(sequence: Sequence, reason: FinishReason) -> Finished:
    name = sequence.request, sequence.attempt, sequence.choice
    return Finished(*name, reason, len(sequence.emitted))


def _continues(before: TokenRun, run: TokenRun) -> bool:
    """True if both are output with equally wide tokens in the buffers."""
    widths = (before.num_values, before.num_top_ids) == (run.num_values, run.num_top_ids)
    return before.kind == run.kind == RunKind.OUTPUT and widths


class Forwarding:
    """Sends the tokens of one tokenizer at most once in ``interval_s``: with shorter steps,
    tokenizer and gateway would repeat the same work for each. First tokens and ends are sent at
    once, and so are tokens if the next step will not end in time."""

    def __init__(self, peer: Peer, interval_s: float) -> None:
        self.peer = peer
        self._interval_s = interval_s
        self._held: list[StepEmissions] = []
        self._spans = SpanBuffer()
        self._loop = asyncio.get_running_loop()
        self._sent_s = self._decided_s = float("-inf")
        self._is_urgent = self._is_deciding = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, emissions: list[Emission], layout: Layout) -> None:
        step = StepEmissions(emissions, layout)
        self._held.append(step)
        self._is_urgent |= step.is_urgent
        self._decide_soon()

    def add_spans(self, report: SpanReport) -> None:
        """A report is sent with the end of its sequence."""
        self._spans.add(report)
        self._is_urgent = True
        self._decide_soon()

    def flush(self) -> None:
        held = self.drop()
        if held or self._spans:
            tokens, arrays = tokens_of(held, self._spans.take())
            self._sent_s = self._loop.time()
            self.peer.send(tokens, *arrays)

    def _decide_soon(self) -> None:
        """Once for everything that arrives in this turn of the loop."""
        if not self._is_deciding:
            self._is_deciding = True
            self._loop.call_soon(self._decide)

    def _decide(self) -> None:
        self._is_deciding = False
        now_s, due_s = self._loop.time(), self._sent_s + self._interval_s
        next_s, self._decided_s = 2 * now_s - self._decided_s, now_s
        if self._is_urgent or next_s > due_s:
            self.flush()
        elif self._held and self._timer is None:
            self._timer = self._loop.call_at(due_s, self.flush)

    def drop(self) -> list[StepEmissions]:
        """Returns the held emissions, which are not sent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_urgent = False
        held, self._held = self._held, []
        return held
