"""Promised times of a cell's requests: refusals, and counts of kept and missed promises."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import Counter

from services.scheduler.extension import Cell, CellExtension
from services.scheduler.promises.first_token import check_first_token
from services.scheduler.results import Emission
from services.scheduler.sequence import Ended, Sequence
from shared.errors import Overloaded

PROMISES = Counter(
    "shoal_promises",
    "Requests with a promised time (ttft, tpot) that ended, or were refused, by outcome",
    ["time", "outcome"],
)


@dataclass(slots=True)
class _Times:
    first_s: float
    last_s: float
    num_tokens: int = 0  # after the first ones


class CellPromises(CellExtension):
    """Has the times of running sequences with a promise."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._times: dict[Sequence, _Times] = {}
        cell.core.checks.append(self._check)

    def _check(self, sequence: Sequence) -> None:
        ends_per_s = self._cell.ends.per_s(sequence.arrived_s)
        try:
            check_first_token(self._cell.core, sequence, ends_per_s)
        except Overloaded:
            PROMISES.labels("ttft", "refused").inc()
            raise

    def note(self, emissions: Iterable[Emission], now_s: float) -> None:
        for emission in emissions:
            sequence = emission.sequence
            if sequence.options.promise is None or not emission.has_output:
                continue
            if not emission.row.run.num_tokens:
                continue  # a repeated step, or an error
            if (times := self._times.get(sequence)) is None:
                self._times[sequence] = _Times(now_s, now_s)
            else:
                times.last_s = now_s
                times.num_tokens += emission.row.run.num_tokens

    def end(self, ended: Ended, now_s: float) -> None:
        """Sequences that end within their time without a token count as none."""
        sequence, times = ended.sequence, self._times.pop(ended.sequence, None)
        promise = sequence.options.promise
        if promise is None:
            return
        if promise.ttft_ms is not None and sequence.attempt == 1:
            first_s = now_s if times is None else times.first_s
            is_kept = 1000 * (first_s - sequence.arrived_s) <= promise.ttft_ms
            if times is not None or not is_kept:
                _count("ttft", is_kept)
        if promise.tpot_ms is not None and times is not None and times.num_tokens:
            tpot_ms = 1000 * (times.last_s - times.first_s) / times.num_tokens
            _count("tpot", tpot_ms <= promise.tpot_ms)


def _count(kind: str, is_kept: bool) -> None:
    PROMISES.labels(kind, "kept" if is_kept else "missed").inc()
