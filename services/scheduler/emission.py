"""Applies the rows of a StepResult to their sequences. No IO."""

import msgspec

from services.scheduler.allocation import Allocation
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.errors import InternalError, InvalidRequest, RequestError
from shared.wire.messages import ResultRow, RunKind, StepResult
from shared.wire.token_arrays import bytes_of


class Emission(msgspec.Struct, frozen=True, gc=False):  # no reference cycle contains it
    """Row ``index`` of a StepResult. ``position`` is the number of output tokens (for a prompt run:
    of scored prompt tokens) the sequence had before it."""

    sequence: Sequence
    index: int
    row: ResultRow
    position: int

    @property
    def ends(self) -> bool:
        return self.row.finish is not None or self.row.error is not None

    @property
    def has_output(self) -> bool:
        return self.row.run.kind == RunKind.OUTPUT

    @property
    def error(self) -> RequestError | None:
        row = self.row
        if row.error is None:
            return None
        return InvalidRequest(row.error, code=row.code) if row.code else InternalError(row.error)

    @property
    def end_reason(self) -> str:
        return self.row.finish or self.row.code or InternalError.code


def apply_result(worker: WorkerState, result: StepResult, ids: list[int]) -> list[Emission]:
    """Adds ``ids``, the ids of all rows, to their sequences. Rows of sequences that no longer run
    on ``worker`` are skipped."""
    emissions = []
    received: dict[Allocation, int] = {}
    start = 0
    of_prompt, of_drafts, pooled = RunKind.PROMPT, RunKind.DRAFTS, RunKind.POOLED
    for index, row in enumerate(result.rows):
        run, sequence = row.run, worker.running.get(row.slot)
        if sequence is not None and sequence.is_of(row):
            kind = run.kind
            position = sequence.num_prompt_scored if kind is of_prompt else len(sequence.emitted)
            emissions.append(Emission(sequence, index, row, position))
            if kind is of_prompt:
                sequence.add_prompt_logprobs(run)
            elif kind is of_drafts or kind is pooled:
                sequence.num_bytes += bytes_of(run)
            elif row.error is None:
                sequence.emit(run, ids[start : start + run.num_tokens])
                allocation = sequence.allocated
                received[allocation] = received.get(allocation, 0) + run.num_tokens
                allocation.num_last = run.num_tokens
            else:
                sequence.allocated.num_last = 0
        start += run.num_tokens
    for allocation, num_tokens in received.items():
        allocation.receive(num_tokens)
    return emissions
