"""The optional parts of a step, in the order of both engines."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from services.worker.machine.streams import Fetched
from services.worker.models import CausalLM
from services.worker.repetition.repetitions import Repetitions
from services.worker.slots.table import SlotTable
from services.worker.step.logprobs import Logprobs
from services.worker.step.prompt_logprobs import PromptLogprobs
from services.worker.step.results import RowPart
from services.worker.step.rows import Rows
from services.worker.step.sampling import Rules
from services.worker.step.step import Backend, PendingResult, Step, StepPart
from shared.wire.messages import ResultRow, RunKind, TokenRun
from shared.wire.token_arrays import TokenArrays

ENDINGS: list[Callable[[SlotTable], StepPart[Any]]] = [
    Repetitions,
]
"""They end outputs early, and precede logprobs: tokens after the end are dropped."""


class Pooler(Protocol):
    """Pools the hidden states of prompts in place of sampling."""

    def pool(self, table: SlotTable, rows: Rows, hidden: Tensor) -> list[tuple[Tensor, list[int]]]:
        """Takes the chunks of a step with their states ``hidden`` [T, hidden_size]. Returns the
        vectors [n, num_values] and slots of prompts that end in it."""

    def part(self, table: SlotTable, backend: Backend) -> StepPart[Any]:
        """The part of each step that pools."""


def make_parts(
    table: SlotTable, backend: Backend, rules: Rules, model: CausalLM, pooler: Pooler | None
) -> list[StepPart[Any]]:
    """A model with a ``pooler`` does not sample."""
    if pooler is not None:
        return [pooler.part(table, backend)]
    return [
        rules,
        *(make(table) for make in ENDINGS),
        Logprobs(table, backend),
        PromptLogprobs(table, backend, model),
        VerifiedDrafts(table, backend),
    ]


class _Scores(NamedTuple):
    slots: np.ndarray  # [n] int64
    fetched: Fetched


class VerifiedDrafts(StepPart[_Scores]):
    """Reports the drafts verified in a step, for requests with ``draft_logprobs``."""

    def __init__(self, table: SlotTable, backend: Backend) -> None:
        self._table = table
        self._backend = backend

    def after_sampling(self, step: Step) -> _Scores | None:
        slots = step.rows.sampling_slots
        if not self._table.wants_draft_logprobs[slots].any():
            return None
        return _Scores(slots, self._backend.fetch_draft_scores(slots))

    def rows_of(self, result: PendingResult, note: _Scores) -> list[RowPart]:
        table, outcome, rows = self._table, result.outcome, result.rows
        slots, num_drafts = rows.sampling_slots, rows.num_drafts[rows.sampling_rows]
        scores = dict(zip(note.slots.tolist(), zip(*note.fetched.wait(), strict=True), strict=True))
        parts = []
        for row in np.flatnonzero(table.wants_draft_logprobs[slots] & (num_drafts > 0)).tolist():
            slot, num = int(slots[row]), int(num_drafts[row])
            logprobs, ranks = scores[slot]
            drafts = outcome.drafts[row, :num].astype(np.int32)
            arrays = TokenArrays(drafts, logprobs[:num], ranks=ranks[:num])
            request, attempt = table.requests[slot]
            num_accepted = int(outcome.num_accepted[row])
            run = TokenRun(num, num_values=1, kind=RunKind.DRAFTS, num_accepted=num_accepted)
            parts.append(RowPart(ResultRow(slot, request, attempt, run), arrays))
        return parts
