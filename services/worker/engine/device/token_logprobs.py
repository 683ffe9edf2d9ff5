"""The logprobs that a step's tokens were asked for, from the device to the result."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kernels.logprobs import logprobs
from kernels.logprobs.num_logprobs import MAX_TOP, NO_LOGPROBS
from services.worker.engine.device.segments import SamplerOutput
from services.worker.machine.streams import Download, upload
from services.worker.slots.table import SlotTable
from services.worker.step.logprobs import (
    StepLogprobs,
    TokenLogprobs,
    by_likelihood,
    logprob_ids,
    num_top_of,
    pieces,
)
from services.worker.step.verify import AcceptOutcome
from shared.wire.messages import MIN_LOGPROB


@dataclass(frozen=True, slots=True)
class _Wide:
    """Logprobs of rows of the logits that ask for others than a step computes by itself."""

    rows: np.ndarray  # [N] int64
    download: Download
    is_named: bool  # of ids that the requests name


class PendingLogprobs:
    """The logprobs of one step: begins the copies to the host, gathers what requests ask for."""

    def __init__(self, table: SlotTable, slots: np.ndarray, sampler_output: SamplerOutput) -> None:
        """``slots`` [R] int64 are those of the rows that sample."""
        self._width = sampler_output.tokens.shape[1]
        self._asked = num_top_of(table.num_logprobs[slots], sampler_output.scores.shape[1])
        self._has_ids = table.has_logprob_ids[slots]
        num = len(slots) * self._width
        self._is_wide = self._has_ids | (self._asked > MAX_TOP)
        is_narrow = (self._asked != NO_LOGPROBS) & ~self._is_wide
        self._narrow = (
            Download(*(each[:num] for each in sampler_output.logprobs)) if is_narrow.any() else None
        )
        vocab_size = sampler_output.scores.shape[1]
        self._wide = [
            self._ask_wide(sampler_output, rows, num_top, ids)
            for num_top, is_named in self._wide_kinds()
            for rows in self._in_pieces(num_top, is_named, vocab_size)
            for ids in [logprob_ids(table, slots[rows // self._width]) if is_named else None]
        ]

    def _wide_kinds(self) -> set[tuple[int, bool]]:
        """How many logprobs are asked for, and whether of ids that requests name."""
        asked, has_ids = self._asked[self._is_wide], self._has_ids[self._is_wide]
        return set(zip(asked.tolist(), has_ids.tolist(), strict=True))

    def resolve(self, outcome: AcceptOutcome) -> StepLogprobs:
        by_token: dict[int, TokenLogprobs] = {}
        narrow = self._narrow.wait() if self._narrow is not None else []
        wide = {row: part for each in self._wide for row, part in _parts(each)}
        for index, row in enumerate(outcome.rows.tolist()):
            asked = int(self._asked[row // self._width])
            if self._is_wide[row // self._width]:
                by_token[index] = wide[row]
            elif asked != NO_LOGPROBS:
                values, top_ids, ranks = (each[row] for each in narrow)
                own = np.maximum(values[: 1 + asked], MIN_LOGPROB)
                by_token[index] = TokenLogprobs(own, top_ids[:asked], int(ranks))
        return StepLogprobs(by_token)

    def _in_pieces(self, num_top: int, is_named: bool, vocab_size: int) -> Iterator[np.ndarray]:
        """All tokens of those of a kind: which are emitted is not known yet."""
        is_of_kind = self._is_wide & (self._asked == num_top) & (self._has_ids == is_named)
        rows = np.flatnonzero(is_of_kind)
        return pieces((rows[:, None] * self._width + np.arange(self._width)).ravel(), vocab_size)

    def _ask_wide(
        self,
        sampler_output: SamplerOutput,
        rows: np.ndarray,
        num_top: int,
        ids: np.ndarray | None,
    ) -> _Wide:
        """``ids`` [N, num_top]: those that are wanted instead of the likeliest."""
        where = upload(rows, sampler_output.scores.device)
        scores, tokens = (
            sampler_output.scores[where],
            sampler_output.tokens.flatten()[where].clamp(min=0),
        )
        if ids is None:
            found = logprobs(scores, tokens, num_top if num_top < scores.shape[1] else None)
        else:
            found = logprobs(scores, tokens, num_top, upload(ids, scores.device))
        download = Download(found.values.clamp(min=MIN_LOGPROB), found.top_ids, found.ranks)
        return _Wide(rows, download, ids is not None)


def _parts(wide: _Wide) -> list[tuple[int, TokenLogprobs]]:
    values, top_ids, ranks = wide.download.wait()
    make = by_likelihood if wide.is_named else TokenLogprobs
    return [
        (row, make(values[index], top_ids[index], int(ranks[index])))
        for index, row in enumerate(wide.rows.tolist())
    ]
