"""The logprobs that a step's tokens were asked for, from the device to the result."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernels.logprobs import logprobs
from kernels.logprobs.num_logprobs import MAX_TOP, NO_LOGPROBS
from services.worker.engine.device.segments import SamplerOutput
from services.worker.machine.streams import Download, upload
from services.worker.slots.table import SlotTable
from services.worker.step.logprobs import StepLogprobs, TokenLogprobs, num_top_of, pieces
from services.worker.step.verify import AcceptOutcome
from shared.messages import MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class _Wide:
    """Logprobs of rows of the logits that ask for more of them than a step computes by itself."""

    rows: np.ndarray  # [N] int64
    download: Download


class PendingLogprobs:
    """The logprobs of one step: begins the copies to the host, gathers what requests ask for."""

    def __init__(self, table: SlotTable, slots: np.ndarray, sampler_output: SamplerOutput) -> None:
        """``slots`` [R] int64 are those of the rows that sample."""
        self._width = sampler_output.tokens.shape[1]
        self._asked = num_top_of(table.num_logprobs[slots], sampler_output.scores.shape[1])
        num = len(slots) * self._width
        is_narrow = (self._asked != NO_LOGPROBS) & (self._asked <= MAX_TOP)
        self._narrow = (
            Download(*(each[:num] for each in sampler_output.logprobs)) if is_narrow.any() else None
        )
        self._wide = [
            self._ask_wide(sampler_output, rows, num_top)
            for num_top in np.unique(self._asked[self._asked > MAX_TOP]).tolist()
            for rows in self._rows_in_pieces(num_top, sampler_output.scores.shape[1])
        ]

    def resolve(self, outcome: AcceptOutcome) -> StepLogprobs:
        by_token: dict[int, TokenLogprobs] = {}
        narrow = self._narrow.wait() if self._narrow is not None else []
        wide = {row: part for each in self._wide for row, part in _parts(each)}
        for index, row in enumerate(outcome.rows.tolist()):
            asked = int(self._asked[row // self._width])
            if asked > MAX_TOP:
                by_token[index] = wide[row]
            elif asked != NO_LOGPROBS:
                values, top_ids, ranks = (each[row] for each in narrow)
                own = np.maximum(values[: 1 + asked], MIN_LOGPROB)
                by_token[index] = TokenLogprobs(own, top_ids[:asked], int(ranks))
        return StepLogprobs(by_token)

    def _rows_in_pieces(self, num_top: int, vocab_size: int) -> Iterator[np.ndarray]:
        """Of all tokens of those that asked for ``num_top``: which are emitted is not known yet."""
        rows = np.flatnonzero(self._asked == num_top)
        return pieces((rows[:, None] * self._width + np.arange(self._width)).ravel(), vocab_size)

    def _ask_wide(self, sampler_output: SamplerOutput, rows: np.ndarray, num_top: int) -> _Wide:
        where = upload(rows, sampler_output.scores.device)
        scores, tokens = (
            sampler_output.scores[where],
            sampler_output.tokens.flatten()[where].clamp(min=0),
        )
        found = logprobs(scores, tokens, num_top if num_top < scores.shape[1] else None)
        return _Wide(
            rows, Download(found.values.clamp(min=MIN_LOGPROB), found.top_ids, found.ranks)
        )


def _parts(wide: _Wide) -> list[tuple[int, TokenLogprobs]]:
    values, top_ids, ranks = wide.download.wait()
    return [
        (row, TokenLogprobs(values[index], top_ids[index], int(ranks[index])))
        for index, row in enumerate(wide.rows.tolist())
    ]
